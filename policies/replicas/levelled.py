"""Replica choices by tokens: what serving systems make of an expert's copies, beside METRO.

An expert's tokens are shared out over its instances so that ranks have about as many. In Python
(`simulator.control.replica_policy`); their time on a GPU is not known, nor charged unless
``overhead_us`` says it."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Ints
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.replicas import base

#: Passes of `Lplb` at most, and the change of a share, tokens, at which it ends.
_PASSES, _SETTLED = 100, 0.01


class CappedParameters(base.ChoiceParameters):
    """Parameters of `Capped`."""

    capacity: float = Field(default=1.0, ge=1)
    """Tokens that a rank computes before some go elsewhere, as a multiple of the mean rank's."""


class _Shares(base.ReplicaChoice):
    """Shares the tokens of each expert out over its instances."""

    Parameters: ClassVar[type[base.ChoiceParameters]] = base.ChoiceParameters

    @abstractmethod
    def shares(self, tokens: list[int], ranks: list[list[int]], n_ranks: int) -> list[list[float]]:
        """Return how many tokens of each expert each of its instances computes, in their order.

        ``tokens``: of each expert; ``ranks``: of its instances; ``n_ranks``: ranks of the group."""

    def choose(
        self,
        tokens_home: Ints,
        experts: Ints,
        placement: Placement,
        layer: int,
        node_of_rank: Ints,
        prompts: bool = False,
    ) -> Ints:
        """Return the slots; see `ReplicaChoice`.

        The instances of an expert take turns in proportion to their shares (Sainte-Lague), so that
        each computes tokens of all ranks."""
        slots = base.slots_of_experts(placement.expert[layer])
        tokens = np.bincount(experts.ravel(), minlength=len(slots))
        on = placement.rank[layer]
        ranks = [on[own[own >= 0]].tolist() for own in slots]
        shares = self.shares(tokens.tolist(), ranks, placement.n_ranks)
        start, turns = np.cumsum(tokens) - tokens, np.zeros(experts.size, np.int64)
        for expert in np.flatnonzero(tokens * ((slots >= 0).sum(axis=1) > 1)).tolist():
            n = _whole(shares[expert], int(tokens[expert]))
            number = np.repeat(np.arange(len(n)), n)
            at = (np.concatenate([np.arange(k) for k in n]) + 0.5) / np.repeat(n, n)
            first = start[expert]
            turns[first : first + len(number)] = number[np.argsort(at, kind="stable")]
        turn = base.place_among_equals(experts.ravel()).reshape(experts.shape)
        return np.asarray(slots[experts, turns[start[experts] + turn]])


class Waterfill(_Shares):
    """Each expert's tokens to its instances as water fills vessels, experts of most tokens first.

    The least loaded ranks rise to one level; SGLang (PR 19290) fills them with the shared expert's
    tokens."""

    name = "waterfill"

    def shares(self, tokens: list[int], ranks: list[list[int]], n_ranks: int) -> list[list[float]]:
        """Return the shares; see `_Shares`."""
        return _poured(tokens, ranks, n_ranks, 1)


class Lplb(_Shares):
    """The linear programme of DeepSeek's LPLB: the fewest tokens on the fullest rank.

    SGLang's ``--ep-dispatch-algorithm lp`` (PR 24515). Pouring experts again until nothing moves
    makes the sum of squared loads least, and the fullest rank's (jobs of one size: Harvey, Ladner,
    Lovasz and Tamir, 2003)."""

    name = "lplb"

    def shares(self, tokens: list[int], ranks: list[list[int]], n_ranks: int) -> list[list[float]]:
        """Return the shares; see `_Shares`."""
        return _poured(tokens, ranks, n_ranks, _PASSES)


class Capped(_Shares):
    """An expert's first instance, until its rank is full; what is more, where there is most room.

    A capacity as in Least-Loaded Expert Parallelism (arXiv 2601.17111), which moves weights; here
    only tokens move."""

    name = "capped"
    Parameters: ClassVar[type[base.ChoiceParameters]] = CappedParameters

    def __init__(self, context: PolicyContext, parameters: CappedParameters | None = None) -> None:
        self._capacity = (parameters or CappedParameters()).capacity

    def shares(self, tokens: list[int], ranks: list[list[int]], n_ranks: int) -> list[list[float]]:
        """Return the shares; see `_Shares`."""
        split = [[float(n), *[0.0] * (len(on) - 1)] for n, on in zip(tokens, ranks, strict=True)]
        load = [0.0] * n_ranks
        for n, on in zip(tokens, ranks, strict=True):
            load[on[0]] += n
        limit = self._capacity * sum(tokens) / n_ranks
        for expert in _by_tokens(tokens, ranks):
            on, own = ranks[expert], split[expert]
            for j in sorted(range(1, len(on)), key=lambda j: load[on[j]]):
                moved = min(own[0], load[on[0]] - limit, limit - load[on[j]])
                if moved > 0.0 and on[j] != on[0]:
                    own[0], own[j] = own[0] - moved, own[j] + moved
                    load[on[0]] -= moved
                    load[on[j]] += moved
        return split


def _by_tokens(tokens: list[int], ranks: list[list[int]]) -> Iterable[int]:
    """Return the experts of several instances that have tokens, the most first."""
    several = (e for e, on in enumerate(ranks) if len(on) > 1 and tokens[e] > 0)
    return sorted(several, key=lambda e: -tokens[e])


def _poured(
    tokens: list[int], ranks: list[list[int]], n_ranks: int, passes: int
) -> list[list[float]]:
    """Pour experts' tokens over their ranks, again until nothing moves or ``passes`` are over."""
    load = [0.0] * n_ranks
    poured = [[0.0] * len(on) for on in ranks]
    for expert, on in enumerate(ranks):
        if len(on) == 1:
            poured[expert] = [float(tokens[expert])]
            load[on[0]] += tokens[expert]
    order, moved = _by_tokens(tokens, ranks), np.inf
    for _ in range(passes):
        if moved < _SETTLED:
            break
        moved = 0.0
        for expert in order:
            on, poured_tokens = ranks[expert], poured[expert]
            for rank, share in zip(on, poured_tokens, strict=True):
                load[rank] -= share
            level, filled = float(tokens[expert]), 0
            lowest = sorted(set(on), key=load.__getitem__)
            for filled, rank in enumerate(lowest, 1):
                level += load[rank]
                if filled == len(lowest) or level <= filled * load[lowest[filled]]:
                    break
            level /= filled
            for j, rank in enumerate(on):
                share = max(0.0, level - load[rank]) / on.count(rank)
                moved = max(moved, abs(share - poured_tokens[j]))
                poured_tokens[j] = share
            for rank, share in zip(on, poured_tokens, strict=True):
                load[rank] += share
    return poured


def _whole(shares: list[float], total: int) -> list[int]:
    """Return shares as whole numbers of the same sum: the largest remainders are rounded up."""
    whole = [int(share + 1e-9) for share in shares]
    rest = sorted(range(len(shares)), key=lambda j: whole[j] - shares[j])
    for j in rest[: total - sum(whole)]:
        whole[j] += 1
    return whole
