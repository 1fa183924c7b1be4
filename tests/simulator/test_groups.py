"""Engines that share experts on both backends, and what must hold of any group."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAllCost
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import combine_s, dispatch_s
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RouterPolicy
from eldr_sim.policies.placement.base import EMPTY, Placement
from eldr_sim.policies.replicas.base import HASH_MULTIPLIER
from eldr_sim.simulator.plane.steps.group_counting import settle_totals
from eldr_sim.simulator.plane.steps.group_state import (
    ALL,
    EXPERT,
    NODE,
    RANK,
    REPLICA_CHOICES,
    Counting,
    GroupCost,
    make_group_scratch,
)
from eldr_sim.simulator.plane.steps.replica_choice import choose_instance
from eldr_sim.simulator.setup.config.engine_rules import EngineRules
from eldr_sim.simulator.setup.replay import make_replicas, rank_masks

from ..on_each import on_each
from ..properties import examples
from ..random_rows import random_prompts
from .random_clusters import (
    N_TRACE,
    cluster_of,
    policies_of,
    random_cluster,
    reference_of,
    with_engines,
)
from .test_engine import assert_same
from .traffic import Traffic, rank_seconds

SUMS = (
    "start", "end", "own_s", "moe_s", "dispatch_s", "combine_s", "choice_s", "wait_s",
    "inside_bytes", "between_bytes",
)  # fmt: skip


def random_group(rng, slots, per_engine, gpus_per_node, copy_per):
    rows = np.concatenate([[0.0, 1.0, 2.0], 3.0 + np.cumsum(rng.uniform(0.5, 9.0, 4))])
    tables = [
        np.cumsum(np.cumsum(1e-4 * rng.random((len(rows), slots + 1)), 0), 1) for _ in range(2)
    ]
    costs = []
    for _ in range(2):
        curves = []
        for _ in range(4):
            curves += [np.cumsum(rng.uniform(5.0, 50.0, 4)) - 5.0, np.cumsum(1e-4 * rng.random(4))]
        for knots in curves[::2]:
            knots[0] = 0.0
        costs.append(AllToAllCost(float(rng.integers(1, 9)), float(rng.integers(1, 9)), *curves))
    moe = RankMoE(int(rng.integers(1, 4)), rows, *tables)
    choice = list(REPLICA_CHOICES.values())[int(rng.integers(len(REPLICA_CHOICES)))]
    gathers, choice_s = bool(rng.integers(2)), 1e-5 * float(rng.integers(3))
    return GroupCost(
        int(copy_per),
        gathers,
        choice,
        choice_s,
        per_engine,
        gpus_per_node,
        moe,
        *costs,
        int(rng.choice([0, 0, 3])),
        split_decode=int(rng.choice([0, 0, 1, 3])),
        split_prompts=int(rng.choice([0, 0, 1, 6])),
        overlap_slowdown=float(rng.choice([1.0, 1.2])),
        chunk_launch_s=1e-3 * float(rng.integers(3)),
    )


def growing(engine):
    """The engine with layers that take longer for more tokens and contexts.

    Peers are padded to the longest dense layers, and no extrapolated attention is negative.
    """
    names = "dense_s", "head_s", "collectives_s", "attention_s"
    tables = {name: np.sort(getattr(engine.step_time.cost, name), axis=-1) for name in names}
    cost = engine.step_time.cost._replace(**tables)
    step_time = SimpleNamespace(cost=cost, n_moe_layers=engine.step_time.n_moe_layers)
    return dataclasses.replace(engine, step_time=step_time)


def grouped_cluster(
    seed, topology, size, per_engine, gpus_per_node, copy_per, n_redundant=0, interval=1,
    balance=(0, 0), apart=(0, 1), **drawn
):  # fmt: skip
    """Return the arguments of a random cluster of groups of ``size`` engines.

    ``apart``: FFN ranks of those that decode, and their micro-batches.
    """
    engines = topology[0] * size, topology[1] * size
    alone = {"launches": max(topology) == 1}
    arguments = random_cluster(seed, engines, grid=0, n_ranks=1, own_experts=True, **drawn, **alone)
    rng, spec = np.random.default_rng([seed, 1]), arguments["spec"]
    n_layers = spec.decode.step_time.n_moe_layers
    n_experts = spec.decode.step_time.cost.n_experts
    trace_layers = int(rng.integers(1, n_layers + 1))
    n_ranks, placements = size * per_engine, []
    if n_ranks % gpus_per_node or apart[0] % gpus_per_node:
        gpus_per_node = n_ranks + apart[0]  # nodes are full
    for number in range(sum(topology)):
        ranks, first = n_ranks, 0
        if apart[0] and number >= topology[0]:
            ranks, first = apart[0], n_ranks
        owner = rng.integers(ranks, size=(trace_layers, n_experts + n_redundant))
        expert = rng.integers(n_experts, size=owner.shape)
        expert[:, :n_experts] = np.arange(n_experts)
        used = n_experts + rng.integers(n_redundant + 1, size=(trace_layers, 1))
        expert[np.arange(expert.shape[1]) >= used] = EMPTY
        load = rng.gamma(1.0, size=(trace_layers, ranks))
        placements += [Placement(expert, owner, ranks, load).with_rank_offset(first)] * size
    pools = {
        name: dataclasses.replace(
            growing(getattr(spec, name)),
            parallelism=Parallelism(per_engine, True, size),
            rules=EngineRules(balance_steps=balance[0], batching_steps=balance[1]),
            group=random_group(rng, n_experts + n_redundant, per_engine, gpus_per_node, copy_per),
        )
        for name in ("prefill", "decode")
    }
    group = pools["decode"].group._replace(ffn_ranks=apart[0], micro_batches=apart[1])
    if apart[0]:  # which have micro-batches
        group = group._replace(split_decode=0, split_prompts=0)
    pools["decode"] = dataclasses.replace(pools["decode"], group=group)
    if engines[0] == 0:
        pools["prefill"] = pools["decode"]
    scheduler = spec.scheduler.model_copy(update={"prefill_schedule_interval": interval})
    arguments["spec"] = with_engines(spec, **pools, scheduler=scheduler)
    arguments["prompts"] = random_prompts(
        rng, arguments["workload"], N_TRACE, trace_layers, n_experts
    )
    arguments["expert_masks"] = rank_masks(placements, n_experts, n_layers)
    arguments["replicas"] = make_replicas(placements, n_experts, n_layers)
    arguments["placements"] = placements
    return arguments


GROUPED = {
    "seed": st.integers(0, 2**32),
    "topology": st.sampled_from([(1, 1), (2, 1), (1, 2), (0, 1), (0, 2)]),
    "size": st.sampled_from([2, 3, 4]),
    "per_engine": st.sampled_from([1, 1, 2, 8]),  # 16 ranks or more are counted another way
    "gpus_per_node": st.sampled_from([1, 2, 4, 8]),
    "interval": st.sampled_from([1, 1, 2, 5]),
    "balance": st.sampled_from([(0, 0), (0, 0), (3, 0), (4, 2), (20, 1)]),
    "n_redundant": st.sampled_from([0, 1, 4, 30]),
    "copy_per": st.sampled_from([ALL, EXPERT, RANK, NODE]),
    "prefix": st.sampled_from([0, 4, 7]),
    "async_scheduling": st.booleans(),
    "slow_transfers": st.booleans(),
    "preempt_by_key": st.booleans(),
    "n_queue_keys": st.sampled_from([1, 3]),
    "aging": st.sampled_from([None, None, 3, 30]),
    "threshold": st.sampled_from([None, None, 4]),
}


def test_prompts_that_wait_for_other_engines_make_fewer_steps_with_prompts():
    """Until both of two engines have prompts, or for 20 steps, sequences decode alone."""
    common = {"topology": (0, 1), "size": 2, "per_engine": 1, "gpus_per_node": 1, "copy_per": ALL}
    common |= {"prefix": 0, "async_scheduling": False, "slow_transfers": False}
    fewer, more = 0, 0
    for seed in range(12):
        counts, ended = [], []
        for balance in ((0, 0), (20, 0)):
            record, _ = run_pair(grouped_cluster(seed, balance=balance, **common))
            ended.append(record.completed.tolist())
            chunks = record.decode_steps["chunks"] > 0
            counts.append(len(set(record.decode_steps["start"][chunks].tolist())))
        assert ended[0] == ended[1]
        fewer += counts[1] < counts[0]
        more += counts[1] > counts[0]
    assert (fewer >= 3, more) == (True, 0), (fewer, more)


def run_pair(arguments, prefill="least_loaded", decode="jsq"):
    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    cluster = cluster_of(**arguments, **policies())
    return cluster.run(), reference_of(**arguments, **policies()).run()


#: The last sequence that decodes is preempted in a step that defers prompts.
DEFERS = {
    "decode": "jsq", "seed": 2443, "topology": (1, 1), "size": 2, "per_engine": 1,
    "gpus_per_node": 1, "interval": 5, "n_redundant": 0, "copy_per": ALL, "prefix": 7,
    "async_scheduling": True, "slow_transfers": True, "preempt_by_key": True, "n_queue_keys": 1,
    "aging": None, "balance": (0, 0), "threshold": None,
}  # fmt: skip


@examples(40, 800, DEFERS, decode=st.sampled_from(["jsq", "round_robin", "holds"]), **GROUPED)
def test_groups_equal_the_reference(decode, **drawn):
    assert_equal_steps(*run_pair(grouped_cluster(**drawn), decode=decode))


def assert_equal_steps(record, reference):
    assert_same(record, reference)
    for name in ("prefill_group_steps", "decode_group_steps"):
        steps, others = getattr(record, name), getattr(reference, name)
        for column in ("n_busy", "pairs", "busiest_pairs", "leader"):
            assert steps[column].tolist() == others[column].tolist(), column
        for column in SUMS:
            close = {"rtol": 1e-9, "atol": 1e-12, "err_msg": column}
            np.testing.assert_allclose(steps[column], others[column], **close)


@settings(max_examples=20)
@given(**GROUPED)
def test_pairs_are_the_tokens_times_their_experts(**drawn):
    arguments = grouped_cluster(**drawn)
    record, _ = run_pair(arguments)
    for steps, groups in (
        (record.prefill_steps, record.prefill_group_steps),
        (record.decode_steps, record.decode_group_steps),
    ):
        assert groups["n_busy"].sum() >= len(steps)
        assert (groups["busiest_pairs"] <= groups["pairs"]).all()
        ranks = drawn["size"] * drawn["per_engine"]
        assert (groups["busiest_pairs"] * ranks >= groups["pairs"]).all()
    workload, replay = arguments["workload"], arguments["replay"]
    if record.completed.all() and not record.requests["preemptions"].any() and drawn["topology"][0]:
        decoded = 0
        for i, window in enumerate(workload.decode_request):
            fed = workload.replay_offset[i] + np.arange(workload.output_len[i])
            rows = replay.first_row[window] + fed % replay.length[window]
            decoded += int(np.bitwise_count(replay.bits[rows]).sum())
        if len(record.requests) == len(workload):
            assert record.decode_group_steps["pairs"].sum() == decoded


def test_what_stands_still_while_a_peer_computes_is_counted():
    """The property would be empty if engines never waited, shared a step or preempted."""
    waits = shared = preempted = alone = 0
    for seed in range(20):
        arguments = grouped_cluster(
            seed, (1, 1), 3, 1, 2, EXPERT, prefix=0, async_scheduling=False, slow_transfers=False
        )
        record, _ = run_pair(arguments)
        waits += (record.decode_group_steps["wait_s"] > 0).sum()
        shared += (record.decode_group_steps["n_busy"] > 1).sum()
        alone += (record.decode_group_steps["n_busy"] < 3).sum()
        preempted += record.requests["preemptions"].sum()
    assert min(waits, shared, alone) > 20
    assert preempted > 0


# -- limits --------------------------------------------------------------------------------------


def free_all_to_all():
    """An all-to-all that takes no time."""
    knots, nothing = np.array([0.0, 1.0]), np.zeros(2)
    return AllToAllCost(1.0, 1.0, *[knots, nothing] * 4)


@on_each("seed", range(8))
def test_one_busy_engine_steps_as_if_alone(seed):
    """All experts on rank 0, a free all-to-all, one request at a time: the plain engine's bytes."""
    arguments = grouped_cluster(
        seed, (0, 1), 3, 1, 8, ALL, prefix=0, async_scheduling=True, slow_transfers=False
    )
    spec = arguments["spec"]
    cost = spec.decode.step_time.cost
    n_layers, n_experts = cost.n_moe_layers, cost.n_experts
    # A table that says of a rank with so many pairs what the plain engine's says of so many tokens.
    rows = np.arange(float(len(cost.mixed_moe_s)))
    by_experts = np.arange(n_experts + 1) * 1e-5
    tables = np.broadcast_to(by_experts, (len(rows), n_experts + 1)).copy()
    free = free_all_to_all()
    group = GroupCost(0, False, 0, 0.0, 1, 8, RankMoE(1, rows, tables, tables), free, free, 0)
    plain_cost = cost._replace(
        moe_s=np.broadcast_to(by_experts, cost.moe_s.shape).copy(),
        mixed_moe_s=np.broadcast_to(by_experts, cost.mixed_moe_s.shape).copy(),
    )
    step_time = SimpleNamespace(cost=plain_cost, n_moe_layers=n_layers)
    engine = dataclasses.replace(spec.decode, step_time=step_time, group=group)
    plain = dataclasses.replace(engine, parallelism=Parallelism(), group=None)
    owner = np.zeros((1, n_experts), int)
    placements = [Placement.of_ranks(owner, 3)] * 3
    masks = rank_masks(placements, n_experts, n_layers)
    common = {"max_concurrency": 1, "max_model_len": 300}
    grouped_run, _ = run_pair(
        arguments
        | {"expert_masks": masks, "replicas": None, "placements": placements}
        | {"spec": with_engines(spec, engine, engine, **common)}
    )
    plain_run, _ = run_pair(
        arguments
        | {"expert_masks": None, "replicas": None}
        | {"spec": with_engines(spec, plain, plain, **common)}
    )
    for name in ("first_token_s", "finish_s"):
        np.testing.assert_allclose(
            grouped_run.requests[name], plain_run.requests[name], rtol=1e-9, err_msg=name
        )
    assert not grouped_run.decode_group_steps["wait_s"].any()


def test_a_ranks_time_grows_with_pairs_and_experts():
    """Of the random tables, too: else a busier rank could be the faster one."""
    moe = random_group(np.random.default_rng(0), 20, 1, 8, ALL).moe
    for prompts in (False, True):
        seconds = np.array(
            [[rank_seconds(moe, p, a, prompts) for a in range(21)] for p in range(40)]
        )
        assert (np.diff(seconds, axis=0) >= 0).all()
        assert (np.diff(seconds, axis=1) >= 0).all()


class Renamed(RouterPolicy):
    """Joins the shortest queue of engines that go by other numbers."""

    name = "renamed"

    def __init__(self, number_of):
        self.number_of = np.array(number_of)

    def select(self, request, workers):
        return int(self.number_of[np.argmin(workers.loads[self.number_of])])


@pytest.mark.parametrize("seed", range(6))
def test_engines_of_a_node_may_change_places(seed):
    """Where every token goes to every rank, all that matters is who is together."""
    arguments = grouped_cluster(
        seed, (0, 1), 4, 1, 8, ALL, prefix=0, async_scheduling=True, slow_transfers=False
    )
    runs = []
    for number_of in ([0, 1, 2, 3], [2, 0, 3, 1]):
        cluster = cluster_of(
            **arguments, prefill_policy=None, decode_policy=Renamed(number_of)
        )  # fmt: skip
        runs.append(cluster.run())
    one, other = runs
    # Whoever comes after the window may end with the run or not, where both happen at once.
    own = one.requests["measured"]
    assert (one.requests["outcome"] == other.requests["outcome"])[own].all()
    ended = (one.requests["finish_s"][own], other.requests["finish_s"][own])
    np.testing.assert_allclose(*ended, rtol=1e-12)
    for name in ("pairs", "busiest_pairs", "n_busy"):
        assert one.decode_group_steps[name].tolist() == other.decode_group_steps[name].tolist()


@pytest.mark.parametrize("copy_per", [ALL, EXPERT, RANK, NODE])
def test_more_tokens_never_shorten_a_step(copy_per):
    """INV-15: Token after token, by rules written once more."""
    before, grew = 0.0, 0
    for n in range(1, 9):
        arguments = grouped_cluster(
            3, (0, 1), 4, 1, 2, copy_per, prefix=0, async_scheduling=False, slow_transfers=False
        )
        group = arguments["spec"].decode.group
        rng = np.random.default_rng(0)
        pairs = np.zeros(4, int)
        traffic = Traffic(4, 2, ("all", "expert", "rank", "node")[copy_per])
        activated = [set() for _ in range(4)]
        for token in range(n):
            ranks = rng.integers(4, size=5).tolist()
            for expert, rank in enumerate(ranks):
                pairs[rank] += 1
                activated[rank].add((rank, expert))
            traffic.token(token % 4, ranks)
        inside, between = traffic.busiest()
        seconds = max(
            rank_seconds(group.moe, p, len(a), False) for p, a in zip(pairs, activated, strict=True)
        )
        seconds += dispatch_s(group.all_to_all, inside, between)
        seconds += combine_s(group.all_to_all, inside, between)
        assert seconds >= before - 1e-15
        grew += seconds > before
        before = seconds
    assert grew > 3


# -- replica choices -----------------------------------------------------------------------------


METROS = ("metro", "metro_sorted", "optimal")


@njit()
def compiled_ranks(counting, layer, experts, homes, places, by_count):
    """Return the rank of each token's instance of each of its experts."""
    found = np.zeros(experts.shape, np.int64)
    turns = np.zeros(counting.replicas.n_instances.shape[2], np.int64)
    for token in range(experts.shape[0]):
        for column in range(experts.shape[1]):
            expert = experts[token, column]
            if counting.replicas.n_instances[0, layer, expert] == 1:  # masks hold these
                found[token, column] = counting.replicas.rank[0, layer, expert, 0]
            elif by_count:
                work = counting.work
                turn = turns[expert]
                turns[expert] += 1
                chosen = work.chosen[turn % work.n_chosen[layer, expert], layer, expert]
                found[token, column] = chosen
            else:
                home, place = homes[token], places[token]
                replicas = counting.replicas
                j = choose_instance(
                    counting.choice, replicas.rank[0, layer, expert],
                    replicas.weight[0, layer, expert], replicas.n_instances[0, layer, expert],
                    counting.group.gpus_per_node, home, (place * HASH_MULTIPLIER) & 0xFFFFFFFF,
                    (place << 40) | (home << 28) | (layer << 16) | expert,
                )  # fmt: skip
                found[token, column] = replicas.rank[0, layer, expert, j]
    return found


@njit()
def compiled_totals(counting):
    """Let choices by count decide from the tokens of each expert in the bit planes."""
    counting.work.held[:] = counting.masks[0]
    settle_totals(counting)


@given(
    choice=st.sampled_from(sorted(REPLICA_CHOICES)),
    seed=st.integers(0, 2**32),
    gpus_per_node=st.sampled_from([1, 2, 4]),
    n_experts=st.sampled_from([1, 5, 16, 70]),
    ranks=st.sampled_from([4, 12]),
    prompts=st.booleans(),
)
def test_compiled_choices_are_those_of_the_policies(
    choice, seed, gpus_per_node, n_experts, ranks, prompts
):
    rng, layers, words = np.random.default_rng(seed), 2, -(-n_experts // 64)
    expert = rng.integers(n_experts, size=(layers, n_experts + int(rng.integers(1, 20))))
    expert[:, :n_experts] = np.arange(n_experts)
    load = np.round(rng.gamma(1.0, size=(layers, ranks)), int(rng.integers(3)))
    placement = Placement(expert, rng.integers(ranks, size=expert.shape), ranks, load)
    n_tokens = int(rng.integers(1, 80))
    experts = np.argsort(rng.random((n_tokens, n_experts)), axis=1)[:, :4]
    homes = np.sort(rng.integers(ranks, size=n_tokens))
    places = np.concatenate([np.arange(n) for n in np.bincount(homes)])
    group = random_group(rng, n_experts, 1, gpus_per_node, ALL)
    number = REPLICA_CHOICES["even" if prompts and choice in METROS else choice]
    replicas = make_replicas([placement], n_experts, layers)
    work = make_group_scratch(layers, layers * words, ranks, n_experts, replicas.rank.shape[3])
    work.tokens[0] = n_tokens
    counts = np.bincount(experts.ravel(), minlength=n_experts)
    for plane in range(8):
        row = np.zeros(64 * words, np.uint8)
        row[:n_experts] = counts >> plane & 1
        bits = np.packbits(row, bitorder="little").view(np.uint64)
        work.planes[plane] = np.tile(bits, layers)
    counting = Counting(
        rank_masks([placement], n_experts, layers), replicas, group, work, 0, ranks, number,
        prompts,
    )  # fmt: skip
    by_count = choice not in ("hash", "source", "weighted", "local_first")
    policy = registry.replica_choice(choice, PolicyContext(1, rng, rank_moe=group.moe))
    if by_count:
        compiled_totals(counting)
    for layer in range(layers):
        node = np.arange(ranks) // gpus_per_node
        more = (prompts,) if by_count else ()
        slots = policy.choose(homes, experts, placement, layer, node, *more)
        found = compiled_ranks(counting, layer, experts, homes, places, by_count)
        np.testing.assert_array_equal(found, placement.rank[layer][slots])
        if by_count:  # each instance that is used counts, two of an expert on one rank too
            used = np.bincount(placement.rank[layer][np.unique(slots)], minlength=ranks)
            np.testing.assert_array_equal(work.instances[:, layer], used)
