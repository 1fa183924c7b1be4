"""Decode policies of ELDR's evaluation other than ELDR itself (Sec. 6, Routers and baselines)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.policies import base
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.rule import Rule


class TieParameters(Parameters):
    """Parameters of policies that take the least loaded of some workers."""

    ties: Literal["turn", "random"] = "turn"
    """Worker among the least loaded: the next of them in turn, or any (as in the runs of
    ELDR's authors)."""


class RandomPolicy(base.RouterPolicy):
    """A worker uniformly at random."""

    name = "random"
    decision = "decode"
    needs = base.Needs(columns=base.NOTHING)

    def __init__(self, context: base.PolicyContext) -> None:
        self._rng = context.rng

    def select(self, request: base.RequestInfo, workers: base.Workers) -> int | None:
        """Return a uniformly drawn healthy worker."""
        usable = workers.usable()
        return usable[int(self._rng.integers(len(usable)))] if usable else None


class RoundRobinPolicy(base.RouterPolicy):
    """The workers in turn, from worker 0."""

    name = "round_robin"
    decision = "decode"
    also = "prefill"
    needs = base.Needs(columns=base.NOTHING)
    rule_by = "nothing"

    def __init__(self, context: base.PolicyContext) -> None:
        self._everyone = Rule(range(context.n_workers), {})

    def rules(self, requests: Sequence[base.RequestInfo]) -> Sequence[Rule]:
        """Return all workers, in turn."""
        return [self._everyone] * len(requests)


class JoinShortestQueuePolicy(base.RouterPolicy):
    """The worker with the fewest in-flight requests."""

    name = "jsq"
    decision = "decode"
    needs = base.Needs(columns=base.LOADS)
    Parameters = TieParameters

    def __init__(
        self, context: base.PolicyContext, parameters: TieParameters | None = None
    ) -> None:
        drawn = parameters is not None and parameters.ties == "random"
        self.rule_by = None if drawn else "nothing"
        self._everyone = Rule(range(context.n_workers), rng=context.rng if drawn else None)

    def rules(self, requests: Sequence[base.RequestInfo]) -> Sequence[Rule]:
        """Return all workers, the least loaded first."""
        return [self._everyone] * len(requests)


class WeightedParameters(Parameters):
    """Parameters of `WeightedPolicy`: the weights of what it adds up."""

    loads: float = 0.0
    """Of requests in flight, as the router counts them."""
    sent: float = 0.0
    """Of requests sent since the engine published."""
    waiting: float = 0.0
    """Of waiting requests, as the engine says, like all that follows."""
    running: float = 0.0
    """Of running requests."""
    waiting_tokens: float = 0.0
    """Of tokens of prompts that wait."""
    running_tokens: float = 0.0
    """Of tokens of the contexts of running requests."""
    kv_usage: float = 0.0
    """Of the share of KV blocks in use."""


class WeightedPolicy(base.RouterPolicy):
    """The worker of the smallest weighted sum of loads and published signals; ties in turn."""

    name = "weighted"
    decision = "decode"
    also = "prefill"
    rule_by = "nothing"
    Parameters = WeightedParameters

    def __init__(self, context: base.PolicyContext, parameters: WeightedParameters) -> None:
        weights = {name: weight for name, weight in parameters if weight}
        # What is sent counts until the engines publish.
        columns = {"waiting" if name == "sent" else name for name in weights}
        self.needs = base.Needs(columns=frozenset(columns))
        self._everyone = Rule(range(context.n_workers), weights)

    def rules(self, requests: Sequence[base.RequestInfo]) -> Sequence[Rule]:
        """Return all workers, weighed."""
        return [self._everyone] * len(requests)


class PowerOfTwoChoicesPolicy(base.RouterPolicy):
    """The less loaded of two distinct workers drawn uniformly (Mitzenmacher 2001).

    A tie goes to the worker drawn first, so that it is uniform too."""

    name = "p2c"
    decision = "decode"
    needs = base.Needs(columns=base.LOADS)

    def __init__(self, context: base.PolicyContext) -> None:
        self._rng = context.rng

    def select(self, request: base.RequestInfo, workers: base.Workers) -> int | None:
        """Return the less loaded of two sampled healthy workers."""
        usable = workers.usable()
        if len(usable) < 2:
            return usable[0] if usable else None
        i = int(self._rng.integers(len(usable)))
        j = int(self._rng.integers(len(usable) - 1))
        first, second = usable[i], usable[j + (j >= i)]
        return second if workers.loads[second] < workers.loads[first] else first


class DomainPolicy(base.RouterPolicy):
    """Workers split among the domains by their calibration mix, JSQ inside the split.

    ELDR's naive locality-aware baseline (Sec. 6): it routes on an oracle domain label. Domains of
    less than one worker's share have workers in common; workers that share experts are one to the
    split."""

    name = "domain"
    decision = "decode"
    needs = base.Needs(experts=True, columns=base.LOADS)
    Parameters = TieParameters

    def __init__(
        self, context: base.PolicyContext, parameters: TieParameters | None = None
    ) -> None:
        drawn = parameters is not None and parameters.ties == "random"
        self.rule_by = None if drawn else "domain"
        calibration = context.require_calibration(self)
        counts = np.bincount(calibration.domain, minlength=len(calibration.domains))
        groups = split_workers(counts, context.n_groups)
        lists = {
            own: Rule(context.members(own), rng=context.rng if drawn else None)
            for own in map(tuple, groups)
        }
        self._pools = [lists[tuple(own)] for own in groups]

    def rules(self, requests: Sequence[base.RequestInfo]) -> Sequence[Rule]:
        """Return the workers of each request's domain."""
        for request in requests:
            if not 0 <= request.domain < len(self._pools):
                allowed = f"0 to {len(self._pools) - 1}"
                raise InputError("domain", f"no domain has the index {request.domain}", allowed)
        return [self._pools[request.domain] for request in requests]


def split_workers(counts: Ints, n_workers: int) -> list[list[int]]:
    """Split the workers among domains in proportion to ``counts`` [n_domains], in blocks by largest
    remainder (Hamilton's method), one at least (ours), as ELDR's authors do.

    Domains of less than one worker's share are one, the last in ties; one without requests has
    their workers, or all."""
    # Integers throughout: the quota of a part = n_workers * count / total.
    total = int(counts.sum())
    large = [d for d, count in enumerate(counts.tolist()) if count and n_workers * count >= total]
    sizes = [int(counts[d]) for d in large]
    if sum(sizes) < total:
        sizes.append(total - sum(sizes))
    quota, parts = [n_workers * size for size in sizes], range(len(sizes))
    given = [max(1, whole // total) for whole in quota]
    while sizes and sum(given) < n_workers:
        given[max(parts, key=lambda p: (quota[p] - given[p] * total, -p))] += 1
    while sum(given) > n_workers:
        able = [p for p in parts if given[p] > 1]
        given[max(able, key=lambda p: (given[p] * total - quota[p], -p))] -= 1
    blocks = [list(range(sum(given[:p]), sum(given[: p + 1]))) for p in parts]
    rest = blocks[-1] if len(blocks) > len(large) else list(range(n_workers))
    own = dict(zip(large, blocks, strict=False))
    return [own.get(d, rest) for d in range(len(counts))]
