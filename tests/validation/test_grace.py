"""GRACE-MoE's evaluation: what its figures are made of, and all of them in a slow test."""

import numpy as np
import pytest

from eldr_sim.planning.studies.figures import Runner
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.setup.replay import rank_masks
from eldr_sim.traces.routing.format import open_trace
from studies.expert_traffic import Batch
from studies.grace import figures as grace_figures
from studies.grace import homes as grace_homes
from studies.grace import map as grace_map
from studies.grace.evaluation import figures
from studies.grace.figures import breadth, copied_everywhere
from studies.grace.serving import _moved
from studies.grace.settings import ACROSS, OTHERS, QWEN, Cluster, Evaluation, gpu_of, requests_of

from ..workloads import make_workload

GPT_OSS = OTHERS[0]


def test_breadth_counts_partners_that_are_equally_common():
    affinity = np.zeros((1, 4, 4))
    affinity[0, 0, 1:] = affinity[0, 1:, 0] = 5
    assert breadth(affinity)[0] == pytest.approx([3, 1, 1, 1])


def test_chosen_experts_are_copied_to_every_other_rank():
    groups = Placement.of_ranks(np.array([[0, 0, 1, 2]]), 3)
    load = np.array([[6.0, 1.0, 3.0, 2.0]])
    made = copied_everywhere(groups, load, load, 1)
    assert made.instances(4).tolist() == [[3, 1, 1, 1]]
    assert made.has_expert(4)[0, :, 0].all()
    assert made.load.tolist() == [[3.0, 5.0, 4.0]]


def test_a_node_shares_its_ethernet():
    for cluster in (Cluster(1, 8), Cluster(2, 2), Cluster(2, 4)):
        assert gpu_of(cluster).nic_bandwidth * cluster.gpus_per_node == 25e9 / 8
    assert gpu_of(Cluster(1, 8)).name == "RTX 3090"
    assert gpu_of(Cluster(2, 4)).name == "RTX 4090 48GB"


def test_fitted_and_judged_requests_are_apart():
    evaluation = Evaluation(range(1))
    trace = evaluation.trace(GPT_OSS.trace)
    assert trace.is_calibration[evaluation.calibration(GPT_OSS).requests].all()
    one, other = ACROSS
    assert (one.fitted_on[0], one.judged_on) == (other.judged_on, other.fitted_on[0])
    fitted = evaluation.calibration(one)
    assert {fitted.domains[d] for d in fitted.domain} == {"sharegpt"}
    for source in QWEN:  # one data set, in two parts
        trace, fitted = evaluation.trace(source.trace), evaluation.calibration(source)
        judged = requests_of(trace, False, source.judged_on)
        assert {trace.domains[d] for d in trace.domain[judged]} == set(source.fitted_on)
        assert {fitted.domains[d] for d in fitted.domain} == set(source.fitted_on)
        assert len(judged) > 0
        assert not set(judged) & set(fitted.requests)


def test_skew_of_groups():
    made = grace_figures.figure_3(Evaluation(range(1), (GPT_OSS,)))
    rows = made.table.to_pylist()
    assert len(rows) == 24
    for row in rows:
        shares = [row[f"group_{i}"] for i in range(4)]
        assert sum(shares) == pytest.approx(1)
        assert shares == sorted(shares, reverse=True)
    assert [claim.ours is not None for claim in made.claims] == [True] * 3


def test_the_map_names_the_fastest_and_who_is_level_with_it(monkeypatch):
    seconds = {"Vanilla": (10, 11, 12), "A": (9, 9.9, 10.8), "B": (9.1, 9.8, 10.9), "C": (9, 12, 9)}

    def times(_evaluation, _source, _tokens, hardware, seed, _fit):
        return {
            (label, rate): s[seed] for label, s in seconds.items() for rate in hardware.networks
        }

    monkeypatch.setattr(grace_map, "_times", times)
    hardware = grace_map._Hardware(None, {3.0: None, 50.0: None})
    rows = grace_map._cells(Evaluation(range(3)), GPT_OSS, 32, hardware, fit=False)
    assert [row["network_gb_s"] for row in rows] == [3.0, 50.0]
    for row in rows:
        # C is faster in the last seed by far, and slower in the second: no seed decides alone.
        assert row["fastest"] == "A"
        assert row["not_told_apart"] == "B, C"
        assert row["A_against_vanilla"] == pytest.approx(-10.0)
        assert row["A_low"] == pytest.approx(row["A_high"])
        assert row["Vanilla_against_vanilla"] == row["Vanilla_low"] == 0.0
        assert row["vanilla_us"] == pytest.approx(11e6)


def test_the_placement_that_a_run_had_is_read_back():
    trace = open_trace(GPT_OSS.trace)
    ranks = np.random.default_rng(0).integers(4, size=(trace.n_layers, trace.n_experts))
    made = rank_masks([Placement.of_ranks(ranks, 4)] * 2, trace.n_experts, trace.n_layers)
    found = grace_homes.placed_by(made[1], trace)
    assert found.rank.tolist() == ranks.tolist()
    assert found.n_ranks == 4


def test_copies_of_a_token_are_other_gpus_of_its_experts():
    placement = Placement.of_ranks(np.array([[0, 0, 1, 2], [3, 2, 1, 0]]), 4)
    batch = Batch(np.array([[[0, 1], [0, 1]], [[2, 3], [2, 3]]]), np.array([0, 2]))
    # First token: none, then 3 and 2. Second, on 2: rank 1 only, then 1 and 0.
    assert grace_homes.reached([batch], placement) == (0 + 2 + 1 + 2) / 4


def test_tokens_of_an_engine_are_those_of_its_requests():
    trace = open_trace("gpt-oss-20b")
    requests = make_workload(
        trace, workload="trace", request_rate=10.0, num_requests=40, output_len=16, seed=0
    )
    worker = np.arange(40) % 4
    for batch in grace_homes.served_batches(trace, requests, worker, 0)[:2]:
        assert np.bincount(batch.home).tolist() == [32] * 4
        for engine in range(4):
            own = set()
            for i in np.flatnonzero(worker == engine):
                first, length = trace.decode_window(requests.decode_request[i])
                for step in range(int(requests.output_len[i])):
                    row = first + (requests.replay_offset[i] + step) % length
                    own.add(trace.experts[row].tobytes())
            assert {token.tobytes() for token in batch.experts[batch.home == engine]} <= own


def test_a_relocation_is_repaid_by_steps_that_are_shorter_by_as_much():
    def run(throughput, step_ms, stall_s, relocations):
        group = {"steps": 100, "mean_step_ms": step_ms, "busiest_rank_pairs_over_mean": 1.0}
        return {
            "output_throughput": throughput, "group": group, "relocated_bytes": 2e9,
            "relocation_stall_s": stall_s, "relocations": relocations,
        }  # fmt: skip

    stale, moved = run(100.0, 10.0, 0.0, 0), run(125.0, 12.0, 0.4, 2)
    row = _moved(25.0, "every 50", [moved], [stale])
    # 12 ms less the 4 ms that steps wait on average are 8: 2 ms less. Each move stands 200 ms.
    assert row["step_ms"] == pytest.approx(8.0)
    assert row["repaid_after_steps"] == pytest.approx(100.0)
    assert row["time_change"] == pytest.approx(-20.0)
    assert _moved(25.0, "stale", [stale], [stale])["repaid_after_steps"] is None


@pytest.mark.slow
def test_every_figure_is_made():
    known = figures(Runner({"model": "Qwen3-30B-A3B"}, 1), quick=True)
    for name, make in known.items():
        made = make()
        assert made.name == name
        assert made.table.num_rows
