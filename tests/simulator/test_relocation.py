"""Experts that move while a run lasts: on both backends, by hand, and in whole runs."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement, PlacementPolicy
from eldr_sim.policies.placement.eplb import balance
from eldr_sim.simulator.control.relocation import (
    ExpertLinks,
    MovableGroup,
    RelocationRule,
    Relocations,
    expert_links,
    expert_moves,
    transfer_of,
)
from eldr_sim.simulator.plane.steps.expert_loads import make_expert_loads, take_counts
from eldr_sim.simulator.plane.steps.group_state import EXPERT
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.replay import make_replicas

from ..properties import examples
from .random_clusters import cluster_of, policies_of, reference_of
from .slow_relocation import SlowRelocations, relocating
from .test_engine import assert_same
from .test_groups import GROUPED, assert_equal_steps, grouped_cluster

MODEL = load_model("Qwen3-30B-A3B")


class ByLoad(PlacementPolicy):
    """Copies the experts chosen most and deals all instances out in the order of their load."""

    name = "by_load"

    def __init__(self, keeps=False):
        self.keeps, self.seen = keeps, []

    def place(self, group):
        raise AssertionError("the placement is given")

    def update(self, group, load, current):
        self.seen.append(load.copy())
        if self.keeps:
            return None if len(self.seen) % 2 else current
        expert = current.expert.copy()
        order = np.argsort(-load, axis=1, kind="stable")
        copies = expert.shape[1] - group.n_experts
        expert[:, group.n_experts :] = np.resize(order.T, (copies, len(load))).T
        each = np.take_along_axis(load, expert, 1)
        rank = np.argsort(np.argsort(-each, 1, "stable"), 1) % group.n_ranks
        of_rank = [np.bincount(*layer, group.n_ranks) for layer in zip(rank, each, strict=True)]
        return Placement(expert, rank, group.n_ranks, np.array(of_rank))


def movable(arguments, drawn, policy, links):
    """Return the groups of a random cluster, all of which may move their experts."""
    size, spec, groups = drawn["size"], arguments["spec"], []
    cost = spec.decode.step_time.cost
    for first in range(0, spec.n_prefill + spec.n_decode, size):
        placement = arguments["placements"][first]
        pool = int(first >= spec.n_prefill)
        number = (first - pool * spec.n_prefill) // size
        group = ExpertGroup(
            range(size), len(placement.expert), cost.n_experts, placement.n_ranks,
            drawn["n_redundant"],
        )  # fmt: skip
        groups.append(
            MovableGroup(first, size, pool, number, group, policy(), placement, links, 1000)
        )
    return groups


def run_pair(drawn, rule, policy=ByLoad, decode="jsq"):
    """Run a random cluster whose groups relocate, on both backends."""
    arguments = grouped_cluster(**drawn)
    spec, prefix = arguments["spec"], drawn["prefix"]
    cost = spec.decode.step_time.cost
    n_layers, n_experts = cost.n_moe_layers, cost.n_experts
    gpus_per_node = spec.decode.group.gpus_per_node
    links = ExpertLinks(7, 3e5, 1e5, gpus_per_node)

    def policies():
        first, second = policies_of(spec, "least_loaded", decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    n_engines = spec.n_prefill + spec.n_decode
    slow = SlowRelocations(rule, movable(arguments, drawn, policy, links), n_layers, n_experts)
    prefiller, decoder, colocated = relocating(slow)
    workers = {"prefill": prefiller, "decode": decoder if spec.n_prefill else colocated}
    reference = reference_of(**arguments, **policies(), workers=workers)
    relocations = Relocations(
        rule, movable(arguments, drawn, policy, links), n_engines, n_layers, n_experts
    )
    placements = arguments["placements"]
    arguments["replicas"] = make_replicas(
        placements, n_experts, n_layers, most=relocations.most_instances
    )
    cluster = cluster_of(**arguments, **policies(), relocations=relocations)
    return cluster.run(), (reference.run(), slow.log), relocations


RULE = st.builds(
    RelocationRule,
    interval=st.integers(1, 12),
    window=st.integers(1, 30),
    asynchronous=st.booleans(),
    overhead_s=st.sampled_from([0.0, 0.0, 2e-3]),
)


def assert_relocations_are_the_same(record, asked):
    log = record.relocations
    assert len(log) == len(asked)
    for name in log.dtype.names:
        expected = np.array([entry[name] for entry in asked])
        np.testing.assert_allclose(log[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)


@examples(16, 200, rule=RULE, decode=st.sampled_from(["jsq", "holds"]), **GROUPED)
def test_relocating_groups_equal_the_reference(rule, decode, **drawn):
    record, (other, log), _ = run_pair(drawn, rule, decode=decode)
    assert_equal_steps(record, other)
    assert_relocations_are_the_same(record, log)


def drawn(seed, topology=(0, 2), **more):
    some = {
        "seed": seed, "topology": topology, "size": 3, "per_engine": 1, "gpus_per_node": 3,
        "interval": 1, "n_redundant": 4, "copy_per": EXPERT, "prefix": 0,
        "async_scheduling": True, "slow_transfers": False, "preempt_by_key": False,
        "n_queue_keys": 1,
    }  # fmt: skip
    return some | more


def test_the_property_is_not_empty():
    """Groups relocate, in their own time, between nodes too, and put it in force while they run."""
    moved = between = apart = in_force = late = 0
    for seed in range(8):
        for rule in (RelocationRule(4, 6), RelocationRule(3, 2, True, 2e-3)):
            apart_by = 1 + 2 * (seed % 2)
            record, (other, moves), _ = run_pair(drawn(seed, gpus_per_node=apart_by), rule)
            assert_same(record, other)
            assert_relocations_are_the_same(record, moves)
            log = record.relocations
            moved += (log["experts"] > 0).sum()
            between += (log["between_bytes"] > 0).sum()
            times = [log["asked_s"][log["group"] == group] for group in (0, 1)]
            apart += not np.isin(times[0], times[1]).all()
            if rule.asynchronous:
                in_force += (log["in_force_s"] > log["asked_s"]).sum()
                late += (log["in_force_s"] < 0).sum()
                assert not log["stall_s"].any()
            else:
                same = log["in_force_s"] - log["asked_s"]
                np.testing.assert_allclose(same, log["transfer_s"], atol=1e-12)
    assert min(moved, between, in_force) > 25
    assert apart > 4
    assert late > 0


def test_each_group_goes_by_its_own_steps():
    """A group asks after a quarter of the interval, then after whole ones of its own steps."""
    for seed in range(6):
        record, _, relocations = run_pair(drawn(seed), RelocationRule(8, 5))
        for group in relocations.groups.values():
            made = (record.decode_group_steps["leader"] == group.number * group.size).sum()
            asked = len(group.policy.seen)
            assert asked == (0 if made < 2 else 1 + (made - 2) // 8)


def test_a_longer_interval_than_the_run_changes_nothing():
    for seed in range(4):
        plain, _, _ = run_pair(drawn(seed), RelocationRule(1 << 20, 1000))
        again, _, _ = run_pair(drawn(seed), RelocationRule(1 << 21, 1, True))
        assert len(plain.relocations) == 0
        for name in ("requests", "decode_steps", "decode_group_steps"):
            assert getattr(plain, name).tobytes() == getattr(again, name).tobytes()


def test_the_same_placement_moves_nothing():
    """A policy that answers None, or where the experts are, moves nothing and costs nothing."""
    asked = 0
    for seed in range(8):
        free, _, kept = run_pair(drawn(seed), RelocationRule(4, 4), lambda: ByLoad(keeps=True))
        plain, _, _ = run_pair(drawn(seed), RelocationRule(1 << 20, 4))
        asked += sum(len(group.policy.seen) for group in kept.groups.values())
        assert not free.relocations["experts"].any()
        assert not free.relocations["transfer_s"].any()
        assert free.requests.tobytes() == plain.requests.tobytes()
    assert asked > 40


def test_failing_policies_end_the_run():
    class Fails(ByLoad):
        def update(self, group, load, current):
            raise ArithmeticError("no placement today")

    with pytest.raises(ArithmeticError, match="today"):
        run_cluster_alone(Fails)

    class OtherRanks(ByLoad):
        def update(self, group, load, current):
            return dataclasses.replace(current, n_ranks=current.n_ranks + 1)

    class Loses(ByLoad):
        def update(self, group, load, current):
            return dataclasses.replace(current, expert=np.zeros_like(current.expert))

    for policy in (OtherRanks, Loses):
        with pytest.raises(ValueError, match="'by_load': no placement of its group"):
            run_cluster_alone(policy)


def test_a_placement_without_loads_is_refused_where_instances_are_weighed():
    class WithoutLoad(ByLoad):
        def update(self, group, load, current):
            return dataclasses.replace(current, load=None)

    run_cluster_alone(WithoutLoad)
    with pytest.raises(InputError, match="replica_choice: it weights instances by the load"):
        run_cluster_alone(WithoutLoad, weighs=True)
    run_cluster_alone(ByLoad, weighs=True)


def run_cluster_alone(policy, weighs=False):
    run_pair_arguments = drawn(0)
    arguments = grouped_cluster(**run_pair_arguments)
    spec = arguments["spec"]
    cost = spec.decode.step_time.cost
    groups = movable(arguments, run_pair_arguments, policy, ExpertLinks(1, 1.0, 1.0, 8))
    relocations = Relocations(
        RelocationRule(2, 2), groups, spec.n_decode, cost.n_moe_layers, cost.n_experts, weighs
    )
    del arguments["placements"]
    first, second = policies_of(spec, "least_loaded", "jsq", 0)
    cluster_of(
        **arguments, prefill_policy=first, decode_policy=second,
        signatures=lambda ranges: (0, None), relocations=relocations,
    ).run()  # fmt: skip


# -- arithmetic ----------------------------------------------------------------------------------


def random_placement(rng, layers, n_experts, redundant, ranks):
    expert = rng.integers(n_experts, size=(layers, n_experts + redundant))
    expert[:, :n_experts] = np.arange(n_experts)
    return Placement(expert, rng.integers(ranks, size=expert.shape), ranks)


@given(
    seed=st.integers(0, 2**32),
    ranks=st.sampled_from([1, 2, 4, 8]),
    gpus_per_node=st.sampled_from([1, 2, 4, 8]),
    redundant=st.sampled_from([0, 3, 20]),
)
def test_moves_are_those_of_the_rules(seed, ranks, gpus_per_node, redundant):
    rng = np.random.default_rng(seed)
    before, after = (random_placement(rng, 3, 10, redundant, ranks) for _ in range(2))
    moves = expert_moves(before, after, 10, gpus_per_node)
    counted = np.zeros_like(moves)
    for layer, source, to in SlowRelocations.moves(before, after, gpus_per_node):
        counted[layer, source, to] += 1
    np.testing.assert_array_equal(moves, counted)
    assert moves.sum() == (after.has_expert(10) & ~before.has_expert(10)).sum()
    assert not np.trace(moves, axis1=1, axis2=2).any()
    assert not expert_moves(before, before, 10, gpus_per_node).any()


def test_a_transfer_by_hand():
    """4 ranks on 2 nodes, 2 layers of a trace for 3 of the model: experts of 10 bytes."""
    before = Placement(np.array([[0, 1, 2, 3]] * 2), np.array([[0, 1, 2, 3]] * 2), 4)
    after = Placement(np.array([[0, 1, 2, 3]] * 2), np.array([[1, 0, 2, 3], [3, 1, 2, 1]]), 4)
    moves = expert_moves(before, after, 4, 2)
    # Layer 0: experts 0 and 1 change places in node 0. Layer 1: 0 to rank 3, 3 to rank 1.
    assert moves[0, 0, 1] == moves[0, 1, 0] == moves[1, 0, 3] == moves[1, 3, 1] == 1
    assert moves.sum() == 4
    moved = transfer_of(moves, ExpertLinks(10, 5.0, 2.0, 2), 3)
    # Model layers 0 and 2 are the trace's layer 0: 10 bytes at 5 a second each; layer 1: 10 at 2.
    assert moved == (6, 2 * 20.0, 20.0, 2 * 10 / 5 + 10 / 2)


@pytest.mark.parametrize(("gpus_per_node", "seconds"), [(4, 30 / 5), (2, 30 / 2)])
def test_a_transfer_waits_for_the_rank_that_sends_or_receives_most(gpus_per_node, seconds):
    """Rank 2 receives three experts, no rank sends more than two; then the other way round."""
    moves = np.zeros((1, 4, 4), np.int64)
    moves[0, 0, 2], moves[0, 1, 2] = 2, 1
    for each in (moves, moves.transpose(0, 2, 1)):
        assert transfer_of(each, ExpertLinks(10, 5.0, 2.0, gpus_per_node), 1).seconds == seconds


def test_the_links_are_those_of_collectives_and_transfers():
    links = expert_links(load_gpu("H100"), 100, 16, 8)
    assert links.inside == pytest.approx(0.68 * 450e9)
    assert links.between == pytest.approx(0.852 * 50e9)
    mi300x = expert_links(load_gpu("MI300X"), 100, 4, 8)
    assert mi300x.inside == pytest.approx(0.75 * 3 * 64e9)


def test_counters_hold_large_numbers():
    loads = make_expert_loads(2, 4)  # two layers of 70 experts
    loads.planes[1, 0, 33, 1] = 1 << 5  # layer 0, expert 69
    loads.planes[1, 1, :3, 2] = 1  # layer 1, expert 0
    counts = take_counts(loads, 1, 70)
    assert counts.shape == (2, 2, 70)
    assert counts[0, 0, 69] == 1 << 33
    assert counts[1, 1, 0] == 7
    assert counts.sum() == (1 << 33) + 7
    assert not loads.planes.any()


# -- whole runs ----------------------------------------------------------------------------------

RUN = {
    "frontend": "none",
    "topology": "1P2D",
    "data_parallel_size": 4,
    "enable_expert_parallel": True,
    "request_rate": 60,
    "num_requests": 60,
    "output_len": 60,
    "policy": "jsq",
    "expert_placement": "eplb:load=none",
    "num_redundant_experts": 16,
}


def run(**values):
    return simulate(make_config(RUN | values))


def test_eplb_takes_a_run_from_the_linear_placement_to_a_balanced_one():
    linear = run(expert_placement="linear")
    moved = run(eplb_interval=40, eplb_window=30)
    summary, log = moved.summary, moved.record.relocations
    assert summary["relocations"] == len(log) == len(summary["relocation_events"]) >= 4
    assert set(log["group"]) == {0, 1}
    assert (log["pool"] == 1).all()  # prefill workers keep theirs
    assert summary["relocated_bytes"] == log["inside_bytes"].sum()
    assert (log["inside_bytes"] == log["experts"] * MODEL.bytes_per_expert).all()
    assert summary["relocation_stall_s"] == pytest.approx(log["transfer_s"].sum())
    assert summary["provenance"]["relocation"]["label"] == "derived"

    def imbalance(result):
        steps = result.record.decode_group_steps[-20:]
        return steps["busiest_pairs"].sum() / steps["pairs"].sum()

    assert imbalance(moved) < imbalance(linear)


def test_gimbal_moves_what_is_new_on_a_gpu_and_without_relocations_nothing():
    values = {"expert_placement": "gimbal", "num_redundant_experts": 0}
    moved = run(**values, eplb_interval=20, eplb_window=2)
    log = moved.record.relocations
    assert len(log) >= 4
    assert log["experts"].all()
    assert (log["inside_bytes"] == log["experts"] * MODEL.bytes_per_expert).all()
    static = run(**values)
    never = run(**values, eplb_interval=10**6)
    for name in ("requests", "decode_steps", "decode_group_steps"):
        assert getattr(static.record, name).tobytes() == getattr(never.record, name).tobytes()


def test_until_the_first_relocation_everything_is_as_without(tmp_path):
    for name, values in (
        ("plain", {}),
        ("rare", {"eplb_interval": 10**6}),
        ("async", {"eplb_interval": 10**6, "eplb_async": True}),
    ):
        write_result(run(**values), tmp_path / name)
    for file in ("requests.parquet", "steps.parquet"):
        assert len({(tmp_path / n / file).read_bytes() for n in ("plain", "rare", "async")}) == 1


def test_waiting_for_experts_or_not():
    waits, goes_on = (
        run(eplb_interval=40, eplb_window=30, eplb_overhead_ms=50, eplb_async=on)
        for on in (False, True)
    )
    assert waits.summary["relocation_stall_s"] > 0.05 * waits.summary["relocations"]
    assert goes_on.summary["relocation_stall_s"] == 0
    assert goes_on.summary["relocations"] >= 2
    assert waits.summary["p99_itl_ms"] > 50 > goes_on.summary["p99_itl_ms"]
    log = goes_on.record.relocations
    done = log["in_force_s"] > 0
    assert done.any()
    assert (log["in_force_s"] >= log["asked_s"] + log["transfer_s"])[done].all()
    starts = goes_on.record.decode_group_steps["start"]
    assert np.isin(log["in_force_s"][done], starts).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eplb_interval": 10, "expert_placement": "linear"}, "eplb_interval: no engines share"),
        ({"eplb_interval": 0}, "eplb_interval: 0"),
        ({"eplb_async": True}, "eplb_async: without eplb_interval"),
        ({"eplb_overhead_ms": 1.0}, "eplb_overhead_ms: without eplb_interval"),
        ({"eplb_interval": 10, "eplb_window": 0}, "eplb_window: 0"),
        (
            {"eplb_interval": 10, "data_parallel_size": 1, "tensor_parallel_size": 4}
            | {"num_redundant_experts": 0, "expert_placement": "eplb"},
            "eplb_interval: no engines share",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        run(**values)
    assert "\n" not in str(caught.value)


def test_eplb_relocates_and_linear_does_not():
    context = PolicyContext(1, np.random.default_rng(0))
    eplb = registry.placement_policy("eplb:load=none", context)
    linear = registry.placement_policy("linear", context)
    assert eplb.needs.counts
    assert not linear.needs.counts
    group = ExpertGroup((), 1, 12, 4, 4)
    load = np.arange(12)[None] ** 2
    start = eplb.place(group)
    np.testing.assert_array_equal(start.expert, linear.place(group).expert)
    np.testing.assert_array_equal(
        eplb.update(group, load, start).expert, balance(load, group).expert
    )


def test_a_small_group_reaches_the_peers_that_it_has():
    """Two MI300X of a node of eight have one link between them, not seven."""
    links = expert_links(load_gpu("MI300X"), 100, 2, 8)
    assert links.inside == pytest.approx(0.75 * 64e9)


def test_a_holder_of_the_same_node_sends_and_no_other():
    """Expert 0 lies on ranks 0 and 2 of two nodes; rank 3 gets it from its own node."""
    before = Placement(np.array([[0, 0, 1]]), np.array([[0, 2, 1]]), 4)
    after = Placement(np.array([[0, 0, 1, 0]]), np.array([[0, 2, 1, 3]]), 4)
    moves = expert_moves(before, after, 2, 2)
    assert (moves.sum(), moves[0, 2, 3]) == (1, 1)
