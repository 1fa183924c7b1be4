"""Which instance of an expert computes a token, where a placement holds several.

A choice decides for every pair of a token and one of its experts, before tokens are sent; the
classes here, in `weighted` and in `metro` are numpy references, usable beside a real engine. EPLB
places instances for an even split (``eplb``), which vLLM has never had: it drew at random (PR
18343), took ``(token * top_k + column) % instances`` (PR 24573), the column alone for two instances
and an even top-k, and takes a hash of the token's position since April 2026 (PR 40810)."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Ints
from eldr_sim.policies.base import Policy
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.placement.base import EMPTY, Placement

#: Multiplier of vLLM's hash: 2^32 divided by the golden ratio (Knuth, vol. 3, Sec. 6.4).
HASH_MULTIPLIER = 2_654_435_769


class Source(NamedTuple):
    """What a default rests on."""

    label: str  #: a provenance, as latency tables have them
    origin: str


class ChoiceParameters(Parameters):
    """Parameters of choices that take time; the default of a subclass says where it is from."""

    source: ClassVar[Source] = Source("derived", "as given")
    overhead_us: float = Field(default=0.0, ge=0)
    """What choosing takes in each MoE layer that has redundant experts, us."""


class ReplicaChoice(Policy):
    """Chooses the instance that computes each pair of a token and an expert."""

    decision = "replica"

    def choose(
        self,
        tokens_home: Ints,
        experts: Ints,
        placement: Placement,
        layer: int,
        node_of_rank: Ints,
        prompts: bool = False,
    ) -> Ints:
        """Return the slot, a column of the placement, that computes each pair, [tokens, top_k].

        ``tokens_home``: shape [tokens]: the rank that holds each token, those of a rank in the
        order of its batch; ``experts``: shape [tokens, top_k]; ``layer``: of the placement;
        ``node_of_rank``: shape [ranks]; ``prompts``: whether the step computes prompts."""
        raise NotImplementedError


class ChoiceByCount(ReplicaChoice, ABC):
    """A choice that needs to know how many tokens each expert has, and nothing else of them.

    These take turns over the instances that are chosen for it."""

    @abstractmethod
    def instances(
        self, tokens: Ints, placement: Placement, layer: int, prompts: bool = False
    ) -> Ints:
        """Return the slots that compute each expert's tokens, in the order of turns, then -1.

        Shape [experts, most instances]; of experts without tokens it does not matter. ``tokens``:
        shape [experts]: how many tokens of all ranks have chosen each expert; ``layer``: of the
        placement."""

    def choose(
        self,
        tokens_home: Ints,
        experts: Ints,
        placement: Placement,
        layer: int,
        node_of_rank: Ints,
        prompts: bool = False,
    ) -> Ints:
        """Return the slots, in turn over the tokens of all ranks; see `ReplicaChoice`."""
        n_experts = int(placement.expert[layer].max()) + 1
        tokens = np.bincount(experts.ravel(), minlength=n_experts)
        slots = self.instances(tokens, placement, layer, prompts)
        count = (slots >= 0).sum(axis=1)
        turn = place_among_equals(experts.ravel()).reshape(experts.shape)
        return np.asarray(slots[experts, turn % count[experts]])


class EvenSplit(ChoiceByCount):
    """An expert's tokens to its instances in turn: the even split that EPLB expects.

    A bound where ranks do not know each other's tokens."""

    name = "even"

    def instances(
        self, tokens: Ints, placement: Placement, layer: int, prompts: bool = False
    ) -> Ints:
        """Return all slots of each expert; see `ChoiceByCount`."""
        return slots_of_experts(placement.expert[layer])


class HashedPosition(ReplicaChoice):
    """By a hash of the token's position in its rank's batch, as vLLM since PR 40810.

    The multiplier is odd: among 2, 4, 8, ... instances consecutive positions take turns."""

    name = "hash"

    def choose(
        self,
        tokens_home: Ints,
        experts: Ints,
        placement: Placement,
        layer: int,
        node_of_rank: Ints,
        prompts: bool = False,
    ) -> Ints:
        """Return the slots; see `ReplicaChoice`."""
        slots, first, count = _instances(placement.expert[layer])
        return slots[first[experts] + _hash(tokens_home)[:, None] % count[experts]]


class NearSource(ReplicaChoice):
    """An instance on the token's own GPU, else on its node, else any; among several by ``hash``.

    GRACE-MoE's routing (Sec. 4.3) takes turns among several by load; SGLang's static dispatch
    settles them ahead."""

    name = "source"

    def choose(
        self,
        tokens_home: Ints,
        experts: Ints,
        placement: Placement,
        layer: int,
        node_of_rank: Ints,
        prompts: bool = False,
    ) -> Ints:
        """Return the slots; see `ReplicaChoice`."""
        used = placement.expert[layer] != EMPTY
        expert, rank = placement.expert[layer][used], placement.rank[layer][used]
        _, first, count = _instances(expert)
        homes, home = np.unique(tokens_home, return_inverse=True)
        node = np.asarray(node_of_rank)
        # 0 on the home rank, 1 on its node, 2 elsewhere; shape [homes, slots].
        away = (rank != homes[:, None]) + (node[rank] != node[homes][:, None]).astype(np.int64)
        slots = np.lexsort((away, np.broadcast_to(expert, away.shape)))
        away = np.take_along_axis(away, slots, axis=1)
        nearest = away[:, first].repeat(count, axis=1)
        near = np.add.reduceat(away == nearest, first, axis=1, dtype=np.int64)
        home = home[:, None]
        turn = _hash(tokens_home)[:, None] % near[home, experts]
        return np.asarray(slots[home, first[experts] + turn])


def slots_of_experts(expert: Ints) -> Ints:
    """Return the slots of each expert of a layer, then -1, [experts, most instances]."""
    slots, first, count = _instances(expert)
    turn = np.arange(count.max())
    found = slots[np.minimum(first[:, None] + turn, len(slots) - 1)]
    return np.where(turn < count[:, None], found, -1)


def _instances(expert: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the slots by expert, and of each expert the first of them and their number."""
    expert = expert[expert != EMPTY]
    count = np.bincount(expert)
    if not count.all():
        raise ValueError(f"the placement has no instance of expert {np.argmin(count)}")
    return np.argsort(expert, kind="stable"), np.cumsum(count) - count, count


def _hash(tokens_home: Ints) -> Ints:
    """Return vLLM's hash of each token's position in its rank's batch, 0 to 2^32 - 1."""
    return (place_among_equals(tokens_home) * HASH_MULTIPLIER) & 0xFFFF_FFFF


def place_among_equals(values: Ints) -> Ints:
    """Return the number of equal values before each value.

    Args:
        values: ``[n]``.

    Returns:
        ``[n]``.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values)) - starts.repeat(np.diff(np.r_[starts, len(values)]))
    return place
