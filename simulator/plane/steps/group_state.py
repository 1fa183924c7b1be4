"""What the steps of engines that share experts read and work on; see `group_step`."""

from itertools import count
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAllCost
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.simulator.plane.state import MAX_POOLS, SEQUENCE, WORKER
from eldr_sim.simulator.plane.steps.bit_planes import EIGHT
from eldr_sim.simulator.plane.steps.expert_loads import ExpertLoads, make_expert_loads

#: What a copy of a token is sent for: see `kernel_profiles.kernels.all_to_all.COPY_PER`.
ALL, EXPERT, RANK, NODE = range(4)
#: Which instance of an expert computes a token: see `replicas.base`, `.weighted` and `.metro`;
#: ASKED is a choice of another package, in Python. From EVEN on, one needs the tokens of each
#: expert and no more; up to OPTIMAL, of those from METRO on, it is for steps without prompts, and
#: EVEN takes its place in the others.
HASH, SOURCE, WEIGHTED, LOCAL_FIRST, ASKED = range(5)
EVEN, METRO, METRO_SORTED, OPTIMAL, TIME_AWARE = range(5, 10)
REPLICA_CHOICES = {
    "even": EVEN,
    "hash": HASH,
    "source": SOURCE,
    "weighted": WEIGHTED,
    "local_first": LOCAL_FIRST,
    "metro": METRO,
    "metro_sorted": METRO_SORTED,
    "optimal": OPTIMAL,
    "time_aware": TIME_AWARE,
}
#: What the loop asks besides a router: that `replica_policy` chooses for a group's step, ASKED.
CHOOSE = np.int64(-5)
_KEPT = 1 << 17  # times of a rank that are kept
TOKENS = 64  # of a block, see `token_blocks`
_PLANES = 20  # bits of a counter: a million tokens of a group in a step


class GroupCost(NamedTuple):
    """What a step of a group costs beside its engines' own parts."""

    copy_per: int  #: ALL, EXPERT, RANK or NODE
    gathers: bool  #: steps without prompts dispatch every token to every rank
    replica_choice: int  #: one of `REPLICA_CHOICES`
    choice_s: float  #: what choosing takes in each MoE layer
    ranks_per_engine: int
    gpus_per_node: int
    moe: Any  #: `RankMoE`
    all_to_all: Any  #: `AllToAllCost`
    gathered: Any  #: `AllToAllCost` of the steps that gather
    chunk: int  #: tokens of an engine that MoE layers compute at once; 0: all of a step
    ffn_ranks: int = 0  #: GPUs that hold the experts beside the engines', see `disaggregated`
    micro_batches: int = 1  #: of a step, where there are such
    #: Tokens of an engine from which a step is computed as two halves, one of which computes while
    #: the other is sent: of steps without prompts, and with; 0: never.
    split_decode: int = 0
    split_prompts: int = 0
    overlap_slowdown: float = 1.0  #: of computing while the other half is sent
    chunk_launch_s: float = 0.0  #: of launching all layers' MoE kernels once more, for a chunk
    #: ``[2, pairs, slots + 1]``: what `rank_moe_s` says of whole pairs and experts, without and
    #: with prompts, as soon as somebody has asked; 0: nobody yet
    moe_s: NDArray[np.float64] = np.zeros((2, 0, 0))


def no_group() -> GroupCost:
    """Return what stands for the cost of a pool of engines that share nothing."""
    rows, table = np.arange(2.0), np.zeros((2, 2))
    knots = np.arange(2.0), np.zeros(2)
    free = AllToAllCost(0.0, 0.0, *knots * 4)
    return GroupCost(0, False, 0, 0.0, 1, 1, RankMoE(1, rows, table, table), free, free, 0)


def make_costs(group: GroupCost) -> GroupCost:
    """Return the cost of a pool for one run, which keeps the times of ranks that it asks for."""
    counts = group.moe.decode_s.shape[1]
    pairs = 1 + int(min(group.moe.rows[-1] * group.moe.top_k, _KEPT / counts))
    return group._replace(moe_s=np.zeros((2, pairs, counts)))


class Replicas(NamedTuple):
    """The experts of groups with several instances, on the trace's layers."""

    multi: NDArray[np.uint64]  #: ``[workers, layers of the model * words]``; empty where none has
    many: NDArray[np.uint64]  #: of them those of three and more
    rank: NDArray[np.int16]  #: ``[workers, layers, experts, instances]``; then the first again
    n_instances: NDArray[np.int16]  #: ``[workers, layers, experts]``
    weight: NDArray[np.float64]  #: ``[workers, layers, experts, instances]``: of their ranks
    #: ``[instances - 1, ranks, tokens of a rank, layers * words]``: the experts of each token that
    #: the second instance computes, the third and so on, where Python chooses; else empty.
    asked: NDArray[np.uint64]


def no_replicas() -> Replicas:
    """Return what stands for placements with one instance of every expert."""
    rank = np.zeros((0, 0, 0, 0), np.int16)
    return Replicas(
        np.zeros((0, 0), np.uint64),
        np.zeros((0, 0), np.uint64),
        rank,
        rank.sum(axis=3, dtype=np.int16),
        np.zeros(rank.shape),
        np.zeros((0, 0, 0, 0), np.uint64),
    )


class GroupScratch(NamedTuple):
    """Working memory of a group's step: planes (`bit_planes`) of the tokens of each expert, and a
    block of tokens (`token_blocks`)."""

    planes: NDArray[np.uint64]  #: ``[bits, layers * words]``: tokens of each expert
    node_planes: NDArray[np.uint64]  #: ``[nodes + 1, bits, layers * words]``; of all
    held: NDArray[np.uint64]  #: ``[ranks, layers * words]``: experts that only this rank computes
    union: NDArray[np.uint64]  #: ``[layers * words]``: activated anywhere
    instances: NDArray[np.float64]  #: ``[ranks, layers]``: activated
    pairs: NDArray[np.float64]  #: ``[ranks, layers]``
    traffic: NDArray[np.float64]  #: ``[4, ranks, layers]``: copies, see `all_to_all_cost`
    tokens: NDArray[np.int64]  #: ``[ranks]``: at home there
    rows: NDArray[np.int64]  #: ``[64]``: rows of bit sets that are counted next
    own: NDArray[np.float64]  #: ``[ranks, layers]``: pairs of the tokens at home there
    # Of experts of several instances:
    copied: NDArray[np.int64]  #: ``[layers, ranks]``: pairs that a rank computes of its own tokens
    near: NDArray[np.float64]  #: ``[ranks, layers]``: of its node's, where there are several nodes
    staged: NDArray[np.uint64]  #: ``[8, layers * words]``: rows that are added together
    empty: NDArray[np.uint64]  #: ``[layers * words]``: a row of zeros
    carry: NDArray[np.uint64]  #: ``[layers * words]``
    mask: NDArray[np.uint64]  #: ``[layers * words]``
    counts: NDArray[np.uint64]  #: ``[3, layers * words]``
    sums: NDArray[np.float64]  #: ``[3, layers]``
    most: NDArray[np.float64]  #: ``[5, layers]``: of the busiest rank, see `shared_layers`
    # Of blocks of tokens:
    block: NDArray[np.uint64]  #: ``[64, layers * words]``: of tokens, or transposed of experts
    block_words: NDArray[np.uint64]  #: ``[64 * layers * words + 1]``: the same memory, and a zero
    filled: NDArray[np.int64]  #: ``[2]``: tokens of the block, and how many each stands for
    home_of: NDArray[np.int64]  #: ``[64]``: where they are at home
    place_of: NDArray[np.int64]  #: ``[64]``: and in which place
    at_home: NDArray[np.uint64]  #: ``[ranks]``: which of them are there
    #: ``[workers, ranks + 2, layers * words]``: what the lists are of: experts of each rank, those
    #: of two instances, and of more
    known: NDArray[np.uint64]
    #: ``[workers, layers, experts and more]``: of one rank after the other their words of a block,
    #: by fours; then the numbers of those of several instances
    listed: NDArray[np.uint32]
    n_listed: NDArray[np.int64]  #: ``[workers, layers, ranks + 2]``: where each part ends
    met: NDArray[np.uint64]  #: ``[ranks + nodes, layers]``: which tokens reach them
    copies: NDArray[np.float64]  #: ``[layers]``: of a home rank for another
    hashed: NDArray[np.uint64]  #: ``[n, instances]``: tokens that each of n instances computes
    split: NDArray[np.uint64]  #: ``[instances]``: the same of one expert
    #: ``[instances, layers, experts]``: tokens so far, in the order of ``listed``; those of turns
    #: count under the first one
    taken: NDArray[np.int64]
    summed: NDArray[np.int64]  #: ``[ranks]``
    # Of choices by count:
    total: NDArray[np.int64]  #: ``[experts]``: tokens of a layer, of experts of several instances
    several: NDArray[np.int64]  #: ``[experts]``: those of them that have tokens
    n_active: NDArray[np.int64]  #: ``[ranks]``: activated experts so far
    load: NDArray[np.float64]  #: ``[ranks]``: pairs so far
    strides: NDArray[np.int64]  #: ``[experts]``: the next that has no factor in common with them
    given: NDArray[np.int64]  #: ``[experts]``: ranks of a layer's, each of which one computes
    chosen: NDArray[np.int64]  #: ``[instances, layers, experts]``: ranks that take turns
    n_chosen: NDArray[np.int64]  #: ``[layers, experts]``
    before: NDArray[np.int64]  #: ``[ranks]``: on a path, the rank before; -1: on none
    moved: NDArray[np.int64]  #: ``[ranks]``: the expert that would move on
    queue: NDArray[np.int64]  #: ``[ranks]``
    seconds: NDArray[np.float64]  #: ``[instances]``
    order: NDArray[np.int64]  #: ``[instances]``


def _stride(more: int, n: int) -> int:
    """Return the least stride above ``more`` in which a walk comes to all of ``n``."""
    return next(stride for stride in count(more + 1) if gcd(stride, n) == 1)


def make_group_scratch(
    n_layers: int, width: int, ranks: int, n_experts: int, instances: int, nodes: int = 1,
    workers: int = 1,
) -> GroupScratch:  # fmt: skip
    """Return working memory for groups of ``ranks`` ranks on ``nodes`` nodes."""

    def words(*shape: int) -> NDArray[np.uint64]:
        return np.zeros((*shape, width), np.uint64)

    def integers(*shape: int) -> NDArray[np.int64]:
        return np.zeros(shape, np.int64)

    block = np.zeros(TOKENS * width + 1, np.uint64)
    return GroupScratch(
        planes=words(_PLANES),
        node_planes=words(nodes + 1, _PLANES),
        held=words(ranks),
        union=words(),
        instances=np.zeros((ranks, n_layers)),
        pairs=np.zeros((ranks, n_layers)),
        traffic=np.zeros((4, ranks, n_layers)),
        tokens=integers(ranks),
        rows=integers(TOKENS),
        own=np.zeros((ranks, n_layers)),
        copied=integers(n_layers, ranks),
        near=np.zeros((ranks, n_layers)),
        staged=words(EIGHT),
        empty=words(),
        carry=words(),
        mask=words(),
        counts=words(3),
        sums=np.zeros((3, n_layers)),
        most=np.zeros((5, n_layers)),
        block=block[:-1].reshape(TOKENS, width),
        block_words=block,
        filled=integers(2),
        home_of=integers(TOKENS),
        place_of=integers(TOKENS),
        at_home=np.zeros(ranks, np.uint64),
        known=words(workers, ranks + 2),
        listed=np.zeros((workers, n_layers, n_experts + 4 * ranks), np.uint32),
        n_listed=integers(workers, n_layers, ranks + 2),
        met=np.zeros((ranks + nodes, n_layers), np.uint64),
        copies=np.zeros(n_layers),
        hashed=np.zeros((instances + 1, instances), np.uint64),
        split=np.zeros(instances, np.uint64),
        taken=integers(instances, n_layers, n_experts),
        summed=integers(ranks),
        total=integers(n_experts),
        several=integers(n_experts),
        n_active=integers(ranks),
        load=np.zeros(ranks),
        strides=np.array([_stride(i, n_experts) for i in range(n_experts)]),
        given=integers(n_experts),
        chosen=integers(instances, n_layers, n_experts),
        n_chosen=integers(n_layers, n_experts),
        before=integers(ranks),
        moved=integers(ranks),
        queue=integers(ranks),
        seconds=np.zeros(instances),
        order=integers(instances),
    )


class MicroBatches(NamedTuple):
    """A step cut into micro-batches, see `disaggregated`."""

    workers: NDArray[np.void]  #: ``WORKER [workers]``: what the engines have of one micro-batch,
    sequences: NDArray[np.void]  #: ``SEQUENCE [workers, places]``: and its sequences
    seconds: NDArray[np.float64]  #: ``[4, micro-batches, layers]``: of each stage
    free: NDArray[np.float64]  #: ``[4]``: since when each stage is, s of the step,
    ready: NDArray[np.float64]  #: ``[micro-batches]``: and each micro-batch for its next one


def make_micro_batches(n_workers: int, places: int, most: int, layers: int) -> MicroBatches:
    """Return room for up to ``most`` micro-batches of engines of ``places`` places."""
    return MicroBatches(
        np.zeros(n_workers, WORKER), np.zeros((n_workers, places), SEQUENCE),
        np.zeros((4, most, layers)), np.zeros(4), np.zeros(most),
    )  # fmt: skip


class Groups(NamedTuple):
    """What the steps of groups need beside what every step needs."""

    costs: tuple[GroupCost, ...]  #: of each pool
    replicas: Replicas
    work: GroupScratch
    loads: ExpertLoads
    micro: MicroBatches


def no_groups() -> Groups:
    """Return what stands for engines that share nothing."""
    return Groups(
        (no_group(),) * MAX_POOLS, no_replicas(), make_group_scratch(1, 1, 1, 1, 0),
        make_expert_loads(0, 0), make_micro_batches(0, 0, 0, 0),
    )  # fmt: skip


class Counting(NamedTuple):
    """What counting a token needs, besides the token."""

    masks: Any  #: uint64 ``[workers, ranks, layers * words]``: experts of one instance
    replicas: Replicas
    group: GroupCost
    work: GroupScratch
    leader: int
    ranks: int
    choice: int  #: of this step
    computes: bool  #: whether the step holds prompts
