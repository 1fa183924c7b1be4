"""Experts that change places while that shortens steps, compiled.

A layer takes dispatch, the experts of the slowest rank, and combine; steps of sampled tokens are
counted as a group's are (`steps.group_step`)."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.kernels import all_to_all_cost
from eldr_sim.kernel_profiles.kernels.all_to_all import COPY_PER, AllToAll, AllToAllCost
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s

_LEAST_GAIN = 1e-6  #: a swap must save this part of the time: what is less is rounding
_WORTH = 1e-3  #: a round over all pairs that saves less of the time is the last


class Steps(NamedTuple):
    """The tokens of equally large steps, one after the other, in one layer."""

    experts: Ints  #: ``[tokens, top_k]``
    home: Ints  #: ``[tokens]``: the rank of each
    n_steps: int
    each: float  #: tokens that each stands for


class Prices(NamedTuple):
    """What a layer's time is made of."""

    moe: RankMoE
    all_to_all: AllToAllCost
    gpus_per_node: int
    per_expert: bool  #: a copy for each expert, not for each rank
    per_node: bool  #: a copy for each node, which forwards it
    dispatches: bool  #: what dispatch sends depends on the placement
    combines: bool  #: and combine
    prompts: bool  #: steps hold prompts


def prices(moe: RankMoE, all_to_all: AllToAll, *, prompts: bool) -> Prices:
    """Return how a group's layers are priced, in steps with or without prompts."""
    per = COPY_PER[all_to_all.backend]
    gathers = not prompts and all_to_all.gathered is not all_to_all.cost
    return Prices(
        moe,
        all_to_all.gathered if gathers else all_to_all.cost,
        all_to_all.gpus_per_node,
        per == "expert",
        per == "node",
        per != "all" and not gathers,
        per != "all",
        prompts,
    )


class _Tally(NamedTuple):
    """What the steps' tokens make of a placement."""

    hits: Ints  #: ``[tokens, ranks]``: a token's experts there
    copies: Floats  #: ``[steps, ranks, ranks]``: by home and target
    node_copies: Floats  #: ``[steps, ranks, nodes]``
    chosen: Ints  #: ``[steps, experts]``: tokens that chose each
    pairs: Ints  #: ``[steps, ranks]``
    active: Ints  #: ``[steps, ranks]``: activated experts
    moe_s: Floats  #: ``[steps, ranks]``
    step_s: Floats  #: ``[steps]``: of the layer
    tokens_of: Ints  #: the tokens of expert 0, of expert 1, ...
    first_of: Ints  #: ``[experts + 1]``: where those of each begin
    has: Any  #: bool ``[tokens, experts]``


def layer_s(ranks: Ints, n_ranks: int, steps: Steps, priced: Prices) -> float:
    """Return the mean time of a layer with expert e on ``ranks[e]``, s."""
    return float(_tally(ranks, n_ranks, steps, priced).step_s.mean())


def swap_for_time(ranks: Ints, n_ranks: int, steps: Steps, priced: Prices) -> Ints:
    """Let pairs of experts change ``ranks``, [E], the first that does, while that shortens the
    layer; nodes are equal runs of ranks. ``steps``, ``priced``: the tokens, and what they cost."""
    found = np.asarray(ranks, np.int64).copy()
    tally = _tally(found, n_ranks, steps, priced)
    _swap_all(found, steps.home, steps.each, tally, priced)
    return found


def _tally(ranks: Ints, n_ranks: int, steps: Steps, priced: Prices) -> _Tally:
    """Count a placement's steps from the beginning."""
    (n, top_k), n_experts = steps.experts.shape, len(ranks)
    n_nodes = max(1, n_ranks // priced.gpus_per_node)
    step = np.arange(n) * steps.n_steps // n
    has = np.zeros((n, n_experts), np.bool_)
    has[np.arange(n)[:, None], steps.experts] = True
    flat = np.argsort(steps.experts.ravel(), kind="stable")
    counts = np.bincount(steps.experts.ravel(), minlength=n_experts)
    chosen = np.zeros((steps.n_steps, n_experts), np.int64)
    np.add.at(chosen, (step[:, None], steps.experts), 1)
    shape = steps.n_steps, n_ranks
    tally = _Tally(
        np.zeros((n, n_ranks), np.int64),
        np.zeros((*shape, n_ranks)),
        np.zeros((*shape, n_nodes)),
        chosen,
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape),
        np.zeros(steps.n_steps),
        flat // top_k,
        np.concatenate([[0], np.cumsum(counts)]),
        has,
    )
    _count(np.asarray(ranks, np.int64), steps.home, steps.each, tally, priced)
    return tally


@njit()
def _count(ranks: Any, home: Any, each: float, tally: Any, priced: Any) -> None:
    n_steps, n_experts = tally.chosen.shape
    for e in range(n_experts):
        _move(tally, priced, home, e, -1, -1, ranks[e])
    for s in range(n_steps):
        for r in range(tally.pairs.shape[1]):
            tally.moe_s[s, r] = _rank_s(tally, s, r, each, priced)
        tally.step_s[s] = _step_s(tally, s, -1, -1, each, priced)


@njit()
def _move(tally: Any, priced: Any, home: Any, e: int, other: int, old: int, new: int) -> None:
    """Count an expert on rank ``new`` and no longer on ``old``, if that is one; tokens of
    ``other``, which changes places, stay."""
    hits, copies, node_copies = tally.hits, tally.copies, tally.node_copies
    tokens_of, has, gpus = tally.tokens_of, tally.has, priced.gpus_per_node
    n_steps, n_ranks = tally.pairs.shape
    size = home.shape[0] // n_steps
    for i in range(tally.first_of[e], tally.first_of[e + 1]):
        token = tokens_of[i]
        if other >= 0 and has[token, other]:
            continue
        step, at = token // size, home[token]
        for rank, more in ((old, -1), (new, 1)):
            if rank < 0:
                continue
            hits[token, rank] += more
            if priced.per_expert:
                copies[step, at, rank] += more
            elif hits[token, rank] == (more + 1) // 2:  # the first one, or none is left
                copies[step, at, rank] += more
                if priced.per_node:
                    first, there = rank // gpus * gpus, 0
                    for r in range(first, min(first + gpus, n_ranks)):
                        there += hits[token, r]
                    if there == (more + 1) // 2:
                        node_copies[step, at, rank // gpus] += more
    for s in range(n_steps):
        n = tally.chosen[s, e]
        if n > 0 and old >= 0:
            tally.pairs[s, old] -= n
            tally.active[s, old] -= 1
        if n > 0:
            tally.pairs[s, new] += n
            tally.active[s, new] += 1


@njit()
def _rank_s(tally: Any, step: int, rank: int, each: float, priced: Any) -> float:
    pairs = tally.pairs[step, rank]
    if pairs == 0:
        return 0.0
    active = float(tally.active[step, rank])
    return float(rank_moe_s(priced.moe, each * pairs, active, priced.prompts))


@njit()
def _step_s(tally: Any, step: int, p: int, q: int, each: float, priced: Any) -> float:
    """Return a step's time, the experts' of ranks p and q anew."""
    slowest = 0.0
    for r in range(tally.pairs.shape[1]):
        if r in (p, q):
            slowest = max(slowest, _rank_s(tally, step, r, each, priced))
        else:
            slowest = max(slowest, tally.moe_s[step, r])
    if not priced.combines:
        return float(slowest)
    if priced.per_node:
        inside, between = all_to_all_cost.busiest_forwarded(
            tally.copies[step], tally.node_copies[step], priced.gpus_per_node
        )
    else:
        inside, between = all_to_all_cost.busiest_direct(tally.copies[step], priced.gpus_per_node)
    slowest += all_to_all_cost.combine_s(priced.all_to_all, each * inside, each * between)
    if priced.dispatches:
        slowest += all_to_all_cost.dispatch_s(priced.all_to_all, each * inside, each * between)
    return float(slowest)


@njit()
def _swap_all(ranks: Any, home: Any, each: float, tally: Any, priced: Any) -> None:
    """Try all pairs, again and again while a round saves `_WORTH` of the time."""
    n_steps, n_experts = tally.chosen.shape
    total = tally.step_s.sum()
    before = np.inf
    while before - total > _WORTH * total:
        before = total
        for a in range(n_experts):
            for b in range(a + 1, n_experts):
                p, q = ranks[a], ranks[b]
                if p == q:
                    continue
                _move(tally, priced, home, a, b, p, q)
                _move(tally, priced, home, b, a, q, p)
                change = 0.0
                for s in range(n_steps):
                    if tally.chosen[s, a] > 0 or tally.chosen[s, b] > 0:
                        change += _step_s(tally, s, p, q, each, priced) - tally.step_s[s]
                if change >= -_LEAST_GAIN * total:
                    _move(tally, priced, home, a, b, q, p)
                    _move(tally, priced, home, b, a, p, q)
                    continue
                ranks[a], ranks[b] = q, p
                for s in range(n_steps):
                    tally.moe_s[s, p] = _rank_s(tally, s, p, each, priced)
                    tally.moe_s[s, q] = _rank_s(tally, s, q, each, priced)
                    tally.step_s[s] = _step_s(tally, s, -1, -1, each, priced)
                total = tally.step_s.sum()
