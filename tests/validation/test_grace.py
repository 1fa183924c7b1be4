"""GRACE-MoE's evaluation: what its figures are made of, and all of them in a slow test."""

import numpy as np
import pytest

from eldr_sim.policies.placement import Placement
from eldr_sim.validation import grace_figures
from eldr_sim.validation.grace_evaluation import figures
from eldr_sim.validation.grace_figures import breadth, copied_everywhere
from eldr_sim.validation.grace_setup import SOURCES, Cluster, Evaluation, gpu_of
from eldr_sim.validation.reproduction import Runner

GPT_OSS = SOURCES[3]


def test_breadth_counts_partners_that_are_equally_common():
    affinity = np.zeros((1, 4, 4))
    affinity[0, 0, 1:] = affinity[0, 1:, 0] = 5
    assert breadth(affinity)[0] == pytest.approx([3, 1, 1, 1])


def test_chosen_experts_are_copied_to_every_other_rank():
    groups = Placement.of_ranks(np.array([[0, 0, 1, 2]]), 3)
    load = np.array([[6.0, 1.0, 3.0, 2.0]])
    made = copied_everywhere(groups, load, load, 1)
    assert made.instances(4).tolist() == [[3, 1, 1, 1]]
    assert made.held(4)[0, :, 0].all()
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
    one, other = SOURCES[0], SOURCES[1]
    assert (one.fitted_on[0], one.judged_on) == (other.judged_on, other.fitted_on[0])
    fitted = evaluation.calibration(one)
    assert {fitted.domains[d] for d in fitted.domain} == {"sharegpt"}


def test_skew_of_groups(monkeypatch):
    monkeypatch.setattr(grace_figures, "SOURCES", (GPT_OSS,))
    made = grace_figures.figure_3(Evaluation(range(1)))
    rows = made.table.to_pylist()
    assert len(rows) == 24
    for row in rows:
        shares = [row[f"group_{i}"] for i in range(4)]
        assert sum(shares) == pytest.approx(1)
        assert shares == sorted(shares, reverse=True)
    assert [claim.ours is not None for claim in made.claims] == [True] * 3


@pytest.mark.slow
def test_every_figure_is_made():
    known = figures(Runner({"model": "Qwen3-30B-A3B"}, 1), quick=True)
    for name, make in known.items():
        made = make()
        assert made.name == name
        assert made.table.num_rows
