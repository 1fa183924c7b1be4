"""`marginal_cost` where experts lie on several GPUs: a layer takes the time of the busiest one.

- The MoE time of a layer is that of the rank for which it is longest, at the expected activated
  experts and (where engines share experts) pairs: the largest expectation, below that of the
  largest.
- Engines that share experts step together: one union, the slowest engine, and every request of the
  group pays. Dispatch and combine are left out.
- Engines that also compute prompts step through those that wait, too, published or sent since, as
  if the next step held them all, cut by the token budget; begun prompts are left out.

An expert of several instances counts in equal parts on their ranks, each as likely."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Floats, Int32s, Ints
from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE, StepCost
from eldr_sim.kernel_profiles.steps.step_cost import decode_attention_s, moe_layers_s, rank_moe_s
from eldr_sim.policies.base import RequestInfo, Workers
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.routing.unions import ExpertUnions, Query, compared, shift


class Shares(NamedTuple):
    """Which part of an expert each rank computes, for G groups; see `shares`."""

    expert: Int32s  #: ``[G, layers, ranks, slots]``
    part: Floats  #: of the same shape; 0 where a rank has fewer slots


def shares(placements: Sequence[Placement], n_experts: int) -> Shares:
    """Return which part of each expert the ranks of the groups compute."""
    ranks = placements[0].n_ranks
    layers = len(placements[0].expert)
    held = [np.bincount(row, minlength=ranks).max() for p in placements for row in p.rank]
    shape = (len(placements), layers, ranks, max(held))
    expert, part = np.zeros(shape, np.int32), np.zeros(shape)
    for g, placement in enumerate(placements):
        instances = placement.instances(n_experts)
        for layer, rank in np.ndindex(layers, ranks):
            own = placement.expert[layer][placement.rank[layer] == rank]
            expert[g, layer, rank, : len(own)] = own
            part[g, layer, rank, : len(own)] = 1.0 / instances[layer, own]
    return Shares(expert, part)


class RankBooks(NamedTuple):
    """What is on K workers in G groups, for the compiled decision."""

    #: Log_idle, idle, activated of `ExpertUnions`, of groups.
    unions: tuple[Floats, NDArray[np.float32], Floats]
    used: Floats  #: ``[G, L, E]``: expected tokens of each expert
    prompt_tokens: Ints  #: ``[K]``
    step_s: Floats  #: ``[G]``: the group's decode step now,
    step_load: Ints  #: ``[G]``: at this load; -1: not known
    growth: Floats  #: ``[K]``: what the request at hand would add, s^2
    waiting: Ints  #: ``[K]``: tokens of prompts that wait there
    prompt_s: Floats  #: ``[tokens + 1]``: see `prompt_seconds`; nothing where none are computed
    busiest: Floats  #: ``[L]``: working memory


class GreedyOnRanks:
    """Sends a request where the cost grows least; what it knows of requests is up to others.

    ``moe``: times of a rank's MoE layer where workers share experts, else None; ``placements``: of
    groups, or of single workers; the ``n_layers`` of activations take in turn;
    ``computes_prompts``: whether workers that share experts do, too."""

    def __init__(
        self,
        step_times: StepCost,
        moe: RankMoE | None,
        placements: Sequence[Placement],
        n_workers: int,
        n_layers: int,
        computes_prompts: bool = False,
    ) -> None:
        self._step_times, self._moe = step_times, moe
        self._shares = shares(placements, step_times.n_experts)
        n_groups = len(placements)
        self._group_size = n_workers // n_groups
        self._unions = ExpertUnions(n_groups, n_layers, step_times.n_experts)
        self._books = RankBooks(
            (self._unions.log_idle, self._unions.idle, self._unions.activated),
            np.zeros((n_groups, n_layers, step_times.n_experts)),
            np.zeros(n_workers, np.int64),
            np.zeros(n_groups),
            np.full(n_groups, -1),
            np.zeros(n_workers),
            np.zeros(n_workers, np.int64),
            prompt_seconds(step_times) if computes_prompts else np.zeros(0),
            np.zeros(n_layers),
        )
        self._reported_s = -np.inf
        self.dearer = np.zeros(n_workers)
        self._resident: dict[tuple[int, int], tuple[int, Array, NDArray[np.float32]]] = {}
        self._next = 0

    def place(
        self,
        request: RequestInfo,
        usage: tuple[NDArray[np.float32], NDArray[np.float32]],
        workers: Workers,
    ) -> int | None:
        """Return the healthy worker of the group with the least growth of cost, and count the
        request there.

        Equal growths, to 1e-12 s^2, are served in turn. None where no worker is healthy."""
        if workers.signals_s != self._reported_s and len(self._books.prompt_s):
            self._books.waiting[:] = workers.waiting_tokens
            self._reported_s = workers.signals_s
        own = workers.loads, workers.healthy, self._next, self.dearer
        query = Query(*own, request.prompt_len, *usage)
        worker: int = place_on_ranks(self._step_times, self._moe, self._shares, self._books, query)
        if worker < 0:
            return None
        self._next = (worker + 1) % len(workers.loads)
        self._resident[request.request_id, worker] = (request.prompt_len, *usage)
        return worker

    def remove(self, request_id: int, worker: int) -> None:
        """Forget a request that was placed on ``worker``; KeyError if there is none."""
        prompt_len, activation, log = self._resident.pop((request_id, worker))
        group = worker // self._group_size
        self._unions.remove(group, log)
        self._books.used[group] -= activation
        self._books.prompt_tokens[worker] -= prompt_len
        self._books.step_load[group] = -1


@njit()
def group_step_s(
    step_times: StepCost, loads: Any, prompt_tokens: Any, moe_s: float, worker: int, prompt_len: int
) -> float:
    """Return the expected time of the step of engines that step together, s, all but ``moe_s`` of
    the slowest (`expected_step_s`). ``loads``, ``prompt_tokens``: [engines]; ``worker``,
    ``prompt_len``: one more request: its engine, -1 for none, and context."""
    places = step_times.head_s.shape[0] - 1
    attention, most = 0.0, 0
    for w in range(loads.shape[0]):
        load, context = loads[w], prompt_tokens[w]
        if w == worker:
            load, context = load + 1, context + prompt_len
        if load > 0:
            batch = min(load, places)
            attention = max(
                attention, decode_attention_s(step_times, batch, context / load * batch)
            )
            most = max(most, load)
    if most == 0:
        return 0.0
    batch = min(most, places)
    fixed = step_times.dense_s[batch] + step_times.head_s[batch] + step_times.collectives_s[batch]
    return float((fixed + step_times.host_s + attention + moe_s) * max(1.0, most / places))


def prompt_seconds(step_times: StepCost) -> Floats:
    """Return what a chunk at the start of a prompt takes an engine besides experts, by its tokens.

    Up to the token budget; s."""
    tables = step_times.dense_s, step_times.collectives_s, step_times.prompt_share_s
    n = min(len(table) for table in (*tables, step_times.mixed_moe_s))
    seconds = np.sum([table[:n] for table in tables], axis=0)
    seconds[0] = 0.0
    return np.maximum.accumulate(seconds)


@njit()
def waiting_prompts_s(
    moe: Any, layers: int, prompt_s: Any, waiting: Any, ranks: int, worker: int, prompt_len: int
) -> float:
    """Return how long engines that step together take for the prompts that wait, s, by the one with
    most tokens left, all experts active and evenly loaded. ``prompt_s``: from `prompt_seconds`;
    ``waiting``: [engines], tokens; ``worker``, ``prompt_len``: one more prompt: its engine, -1 for
    none, and tokens."""
    most, total, budget = 0, 0, prompt_s.shape[0] - 1
    for w in range(waiting.shape[0]):
        tokens = waiting[w] + (prompt_len if w == worker else 0)
        most, total = max(most, tokens), total + tokens
    if most == 0:
        return 0.0
    own = (most // budget) * prompt_s[budget] + prompt_s[most % budget]
    pairs, slots = total * moe.top_k / ranks, moe.mixed_s.shape[1] - 1
    return float(own + layers * rank_moe_s(moe, pairs, slots, True))


@njit()
def busiest_moe_s(
    step_times: StepCost,
    moe: Any,
    shares: Shares,
    books: RankBooks,
    group: int,
    activation: Any,
    more: float,
    load: int,
) -> float:
    """Return the expected time of a group's MoE layers, each as long as its busiest rank's, s.

    ``activation``, ``more``: one more request's, [L, E], counted 1 or 0 times; ``load``: requests
    of the group, with it; those beyond its places do not compute. Others as of `place_on_ranks`."""
    idle, used = books.unions[1], books.used
    n_layers, ranks = used.shape[1], shares.expert.shape[2]
    size = books.prompt_tokens.shape[0] // used.shape[0]
    places = step_times.head_s.shape[0] - 1
    computing = min(1.0, size * places / load)
    total = 0.0
    for layer in range(n_layers):
        at = layer % shares.expert.shape[1]
        most = 0.0
        for r in range(ranks):
            count, pairs = 0.0, 0.0
            for s in range(shares.expert.shape[3]):
                e, part = shares.expert[group, at, r, s], shares.part[group, at, r, s]
                p = more * activation[layer, e]
                count += part * (1.0 - idle[group, layer, e] * (1.0 - p))
                pairs += part * (used[group, layer, e] + p)
            if moe is None:
                most = max(most, count)
            elif pairs > 0.0:
                most = max(most, rank_moe_s(moe, pairs * computing, count, False))
        books.busiest[layer] = most
        total += most
    if moe is None:  # engines of their own: the table is that of a rank, by the worker's tokens
        total = moe_layers_s(step_times.moe_s[min(load, places)], books.busiest)
    return float(total * (step_times.n_moe_layers / n_layers))


@njit()
def place_on_ranks(
    step_times: StepCost, moe: Any, shares: Shares, books: RankBooks, asked: Query
) -> int:
    """Return the worker of the group with the least growth of cost, and enter it in the
    ``books``; -1 where no worker is healthy. ``moe``: of a rank where workers share experts;
    ``shares``: where experts lie."""
    loads, prompt_len, activation = asked.loads, asked.prompt_len, asked.activation
    n_workers, n_groups = loads.shape[0], books.used.shape[0]
    size, ranks, layers = n_workers // n_groups, shares.expert.shape[2], step_times.n_moe_layers
    for g in range(n_groups):
        start, stop = g * size, (g + 1) * size
        own, tokens = loads[start:stop], books.prompt_tokens[start:stop]
        waiting = books.waiting[start:stop]
        load = own.sum()
        if books.step_load[g] != load:
            now = 0.0
            if load > 0:
                moe_s = busiest_moe_s(step_times, moe, shares, books, g, activation, 0.0, load)
                now = group_step_s(step_times, own, tokens, moe_s, -1, 0)
            books.step_s[g], books.step_load[g] = now, load
        now = books.step_s[g]
        prompts = moe is not None and books.prompt_s.shape[0] > 0
        if moe is not None:  # noqa: SIM102 by itself: the compiler drops it where None
            if prompts:
                now += waiting_prompts_s(moe, layers, books.prompt_s, waiting, ranks, -1, 0)
        moe_s = busiest_moe_s(step_times, moe, shares, books, g, activation, 1.0, load + 1)
        for w in range(size):
            then = group_step_s(step_times, own, tokens, moe_s, w, prompt_len)
            if moe is not None:  # noqa: SIM102
                if prompts:
                    then += waiting_prompts_s(
                        moe, layers, books.prompt_s, waiting, ranks, w, prompt_len
                    )
            books.growth[start + w] = (load + 1) * then**2 - load * now**2
    best, least = -1, 0.0
    for i in range(n_workers):
        w = (asked.first + i) % n_workers
        rounded = compared(books.growth[w], asked.dearer[w])
        if asked.healthy[w] and (best < 0 or rounded < least):
            best, least = w, rounded
    if best < 0:
        return best
    g = best // size
    shift(books.unions[0], books.unions[1], books.unions[2], g, asked.log, 1.0)
    books.used[g] += activation
    books.prompt_tokens[best] += prompt_len
    books.waiting[best] += prompt_len
    books.step_load[g] = -1
    return best
