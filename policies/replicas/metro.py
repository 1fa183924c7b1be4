"""Replica choices by activated experts: METRO's, what would be optimal, and one by time.

A step bound by memory bandwidth pays for each expert that a rank activates. METRO (arXiv
2512.09277) lets one instance compute all tokens of an expert (no loss: its Lemma 1), chosen so that
the rank with the most activated experts has few: jobs of one size on machines that may do them.
Ranks gather each other's tokens before the gate for that (Sec. IV-C): ``allgather_alltoall`` in
`kernel_profiles.kernels.all_to_all`."""

from abc import abstractmethod
from math import gcd

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.replicas import base

#: Multiplier of the hash of `walk`: 2^64 divided by the golden ratio.
WALK_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
_WORD = 0xFFFF_FFFF_FFFF_FFFF


class MetroParameters(base.ChoiceParameters):
    """Parameters of METRO's choice."""

    source = base.Source("published", "METRO Fig. 11: A100, 1.5 instances")
    overhead_us: float = Field(default=26.0, ge=0)
    """What choosing takes in each MoE layer that has redundant experts, us. METRO's kernel takes up
    to 26 us (Fig. 11: Qwen3-30B on 8 A100, 1.5 instances an expert); it is not scaled to others."""


class SortedParameters(MetroParameters):
    """Parameters of `MetroSorted`."""

    source = base.Source("derived", "METRO's kernel, which does as much")


class TimeParameters(MetroParameters):
    """Parameters of `TimeAware`."""

    source = base.Source("derived", "METRO's kernel, which does less")


class OptimalParameters(base.ChoiceParameters):
    """Parameters of the optimal choice."""

    source = base.Source("published", "METRO Fig. 6: Dinic on a CPU")
    overhead_us: float = Field(default=116.3, ge=0)
    """What choosing takes in each MoE layer that has redundant experts, us. METRO measured 116.3 to
    128.8 us with maximum flow on a CPU, 290 us on a GPU (Fig. 6), and 26.5 us for a copy to the
    CPU."""


class _Gathering(base.ChoiceByCount):
    """A choice that needs the tokens of all ranks: the backend has to gather them."""

    needs = Needs(gathers=True)


class _OneInstance(_Gathering):
    """Chooses one instance of every expert in steps without prompts, else splits them evenly.

    METRO's kernel is part of the CUDA graphs of decode steps (Sec. V); prompts keep EPLB's split.
    """

    @abstractmethod
    def ranks(self, tokens: Ints, homes: list[Ints], n_ranks: int, layer: int) -> Ints:
        """Return the rank of each expert, shape [experts]; -1 for those without tokens.

        ``tokens``: shape [experts]; ``homes``: the ranks that have an instance of each expert, in
        the order of its slots; ``n_ranks``, ``layer``: ranks of the group; layer of the placement.
        """

    def instances(
        self, tokens: Ints, placement: Placement, layer: int, prompts: bool = False
    ) -> Ints:
        """Return one slot of each expert that has tokens, or all; see `ChoiceByCount`."""
        slots = base.slots_of_experts(placement.expert[layer])
        if prompts:
            return slots
        on = placement.rank[layer]
        homes = [on[own[own >= 0]] for own in slots]
        chosen = self.ranks(tokens, homes, placement.n_ranks, layer)
        first = [int(np.argmax(own == rank)) for own, rank in zip(homes, chosen, strict=True)]
        return slots[np.arange(len(slots)), first][:, None]


class Metro(_OneInstance):
    """METRO (Algorithm 1): each expert to its rank with the fewest activated experts so far.

    In the order of a walk with hashed start and stride: threads of METRO's kernel race for
    locks."""

    name = "metro"
    Parameters = MetroParameters

    def ranks(self, tokens: Ints, homes: list[Ints], n_ranks: int, layer: int) -> Ints:
        """Return the rank of each expert; see `_OneInstance`."""
        start, stride = walk(tokens > 0, layer)
        order = (start + stride * np.arange(len(tokens))) % len(tokens)
        return _greedy(order[tokens[order] > 0], homes, np.zeros(n_ranks, np.int64), len(tokens))


class MetroSorted(_OneInstance):
    """METRO with the experts of one instance first: the same work, fewer experts on the fullest.

    Not the paper's."""

    name = "metro_sorted"
    Parameters = SortedParameters

    def ranks(self, tokens: Ints, homes: list[Ints], n_ranks: int, layer: int) -> Ints:
        """Return the rank of each expert; see `_OneInstance`."""
        return _sorted(tokens, homes, n_ranks)


class Optimal(_OneInstance):
    """The fewest activated experts on the fullest rank, exactly.

    From `MetroSorted`, experts move along paths of ranks from a fullest one to one with two fewer
    while there are such (Harvey, Ladner, Lovasz and Tamir, Semi-matchings for bipartite graphs,
    2003)."""

    name = "optimal"
    Parameters = OptimalParameters

    def ranks(self, tokens: Ints, homes: list[Ints], n_ranks: int, layer: int) -> Ints:
        """Return the rank of each expert; see `_OneInstance`."""
        chosen = _sorted(tokens, homes, n_ranks)
        active = np.flatnonzero(tokens > 0)
        several = [e for e in active.tolist() if len(homes[e]) > 1]
        count = np.bincount(chosen[active], minlength=n_ranks)
        least = -(-len(active) // n_ranks)
        while count.max(initial=0) > least:
            top = int(np.argmax(count))
            before, moved, queue = {top: top}, {}, [top]
            end = -1
            while queue and end < 0:
                rank = queue.pop(0)
                steps = [(e, int(r)) for e in several if chosen[e] == rank for r in homes[e]]
                for expert, other in steps:
                    if other in before:
                        continue
                    before[other], moved[other] = rank, expert
                    queue.append(other)
                    if count[other] <= count[top] - 2:
                        end = other
                        break
            if end < 0:
                break
            count[top] -= 1
            count[end] += 1
            while end != top:
                chosen[moved[end]] = end
                end = before[end]
        return chosen


class TimeAware(_Gathering):
    """By the predicted time of the ranks, from their tokens and activated experts.

    Not the paper's. Experts with several instances, by falling tokens, take the ranks that are
    fastest with their share, as many as let the sum of squared times grow least (`marginal_cost`):
    one where reading experts decides, all where tokens do, so prompts need no other choice."""

    name = "time_aware"
    needs = Needs(gathers=True, costs=True)
    Parameters = TimeParameters

    def __init__(self, context: PolicyContext, parameters: TimeParameters | None = None) -> None:
        self._moe = context.rank_moe

    def instances(
        self, tokens: Ints, placement: Placement, layer: int, prompts: bool = False
    ) -> Ints:
        """Return the slots of each expert; raises InputError without times of a rank."""
        if self._moe is None:
            raise InputError(self.name, "it needs the times of a rank's MoE layer", "rank_moe")
        slots = base.slots_of_experts(placement.expert[layer])
        on, chosen = placement.rank[layer], np.full(slots.shape, -1)
        count, pairs = np.zeros(placement.n_ranks, np.int64), np.zeros(placement.n_ranks)
        several = []
        for expert, own in enumerate(slots):
            if tokens[expert] == 0:
                chosen[expert, 0] = own[0]
            elif (own >= 0).sum() > 1:
                several.append(expert)
            else:
                chosen[expert, 0] = own[0]
                count[on[own[0]]] += 1
                pairs[on[own[0]]] += tokens[expert]
        for expert in sorted(several, key=lambda e: (-tokens[e], e)):
            own = slots[expert][slots[expert] >= 0]
            homes, first = np.unique(on[own], return_index=True)
            homes, own = homes[np.argsort(first)], own[np.sort(first)]
            best, before = np.inf, self._seconds(pairs[homes], count[homes], prompts)
            for n in range(1, min(len(homes), int(tokens[expert])) + 1):
                most = -(-int(tokens[expert]) // n)
                after = self._seconds(pairs[homes] + most, count[homes] + 1, prompts)
                taken, growth = np.argsort(after, kind="stable")[:n], 0.0
                for home in taken.tolist():
                    growth += after[home] * after[home] - before[home] * before[home]
                if growth < best:
                    best, picked = growth, taken
            n = len(picked)
            chosen[expert, :n] = own[picked]
            share = (int(tokens[expert]) - np.arange(n) + n - 1) // n
            pairs[homes[picked]] += share
            count[homes[picked]] += 1
        return chosen

    def _seconds(self, pairs: Floats, count: Ints, prompts: bool) -> Floats:
        """Return the time of ranks with so many pairs and activated experts, s."""
        from eldr_sim.kernel_profiles.steps.step_cost import (
            rank_moe_s,  # compiled: takes long to import
        )

        return np.array(
            [
                rank_moe_s(self._moe, float(p), float(c), prompts) if p > 0 else 0.0
                for p, c in zip(pairs.tolist(), count.tolist(), strict=True)
            ]
        )


def walk(active: Bools, layer: int) -> tuple[int, int]:
    """Return start and stride of a walk round the experts, a hash of the ``active`` ones."""
    n = len(active)
    mixed = layer + 1
    for first in range(0, n, 64):
        bits = np.flatnonzero(active[first : first + 64]).tolist()
        mixed = ((mixed ^ sum(1 << bit for bit in bits)) * WALK_MULTIPLIER) & _WORD
        mixed ^= mixed >> 32
    stride = 1 + (mixed >> 32) % max(n - 1, 1)
    while gcd(stride, n) != 1:
        stride += 1
    return mixed % n, stride


def _greedy(order: Ints, homes: list[Ints], count: Ints, n_experts: int) -> Ints:
    """Give experts in ``order`` each to its home with the least ``count``, which grows."""
    chosen = np.full(n_experts, -1)
    for expert in order.tolist():
        rank = homes[expert][np.argmin(count[homes[expert]])]
        chosen[expert] = rank
        count[rank] += 1
    return chosen


def _sorted(tokens: Ints, homes: list[Ints], n_ranks: int) -> Ints:
    """Return the ranks of `MetroSorted`."""
    active = np.flatnonzero(tokens > 0)
    several = np.array([len(homes[e]) > 1 for e in active.tolist()], np.bool_)
    order = np.concatenate([active[~several], active[several]])
    return _greedy(order, homes, np.zeros(n_ranks, np.int64), len(tokens))
