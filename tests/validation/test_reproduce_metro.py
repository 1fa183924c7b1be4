"""METRO's reproduction: its batches against sets, its frontier by hand, its command."""

import json

import numpy as np
import pytest

from eldr_sim.traces.routing.format import REFERENCE_TRACE, open_trace
from studies.metro.evaluation import figures, make_runner
from studies.metro.pareto import Point, at_tpot, frontier
from studies.metro.results import REAL, SIMULATED, Dataset, _gains, write_log
from studies.metro.routing import Routing, rank_times, route


@pytest.fixture(scope="module")
def routing():
    trace = open_trace(REFERENCE_TRACE)
    return Routing("embedded, code", "Qwen3-30B-A3B", 8, trace, "code")


def ids_of(routing, row):
    """The experts of a token in each layer, as sets."""
    bits = routing.trace.bits[row]
    return [
        {64 * k + b for k, word in enumerate(layer.tolist()) for b in range(64) if word >> b & 1}
        for layer in bits
    ]


def test_batches_are_serving_requests_of_the_domain(routing):
    trace, rows = routing.trace, routing.rows
    first, n = trace.decode_window(np.arange(len(trace.domain)))
    owner = np.concatenate([np.full(k, i) for i, k in enumerate(n)])
    start = np.concatenate([np.arange(f, f + k) for f, k in zip(first, n, strict=True)])
    mine = owner[np.isin(start, rows)]
    assert set(trace.domain[mine]) == {trace.domains.index("code")}
    assert not trace.is_calibration[mine].any()
    assert len(rows) == n[np.unique(mine)].sum()


def test_a_batch_without_replicas_counted_by_hand(routing):
    batches = routing.batches(16, 3)
    placement = routing.placement(1.0)
    steps = route(routing, placement, "even", batches)
    busiest, active, pairs = [], [], []
    for batch in batches:
        tokens = [ids_of(routing, row) for row in batch]
        for layer in range(len(tokens[0])):
            chosen = [e for token in tokens for e in token[layer]]
            rank_of = dict(zip(placement.expert[layer], placement.rank[layer], strict=True))
            count = np.bincount([rank_of[e] for e in set(chosen)], minlength=8)
            busiest.append(count.max())
            active.append(count.sum())
            pairs.append(np.bincount([rank_of[e] for e in chosen], minlength=8).max())
    assert steps.busiest == pytest.approx(np.mean(busiest))
    assert steps.active == pytest.approx(np.mean(active))
    assert steps.pairs == pytest.approx(sum(pairs) * 8 / (16 * 8 * len(pairs)))


def test_the_choices_order_the_experts_and_the_times(routing):
    batches, placement = routing.batches(32, 10), routing.placement(1.5)
    moe = rank_times("Qwen3-30B-A3B", "H100", 8, 24, 64)
    made = {
        choice: route(routing, placement, choice, batches, moe)
        for choice in ("optimal", "metro_sorted", "metro", "even")
    }
    busiest = [steps.busiest for steps in made.values()]
    assert busiest == sorted(busiest)
    assert made["optimal"].moe_us < made["even"].moe_us
    assert made["even"].active > made["metro"].active == made["optimal"].active


def test_a_frontier_and_its_throughput_at_a_tpot():
    def point(tpot, rate):
        return Point("c", 1.5, "METRO", "EP8", 1, tpot, rate)

    points = [point(2.0, 30.0), point(1.0, 10.0), point(3.0, 25.0), point(4.0, 50.0)]
    assert [p.tpot_ms for p in frontier(points)] == [1.0, 2.0, 4.0]
    assert at_tpot(points, 0.9, steps=False) == 0.0
    assert at_tpot(points, 3.0, steps=True) == 30.0
    assert at_tpot(points, 3.0, steps=False) == 40.0


def test_gains_are_differences_to_the_same_case_and_ratio():
    rows = [
        {"case": "a", "ratio": 1.0, "choice": "none", "x": 10.0},
        {"case": "a", "ratio": 1.5, "choice": "EPLB", "x": 20.0},
        {"case": "a", "ratio": 1.5, "choice": "METRO", "x": 15.0},
    ]
    assert _gains(rows, "x") == {"a, 1.5x": pytest.approx(-25.0)}
    assert _gains(rows, "x", "METRO", "none") == {"a, 1.5x": pytest.approx(50.0)}


def test_set_ups_are_the_papers(tmp_path):
    fields = REAL.fields(1.125)
    assert (fields["num_redundant_experts"], fields["max_num_seqs"]) == (16, 32)
    assert fields["data_parallel_size"] == 8
    assert SIMULATED[1].fields(1.5)["num_redundant_experts"] == 128
    assert SIMULATED[1].fields(1.5)["max_num_seqs"] == 64
    log = write_log(Dataset("d", "code", 100, 50), 3, 10, tmp_path)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines == [{"timestamp_ms": 0, "input_length": 10, "output_length": 5}] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["figure_5", "figure_8", "figure_11", "figure_13", "forms", "migration"]
)
def test_figures_in_quick_mode(name):
    reproduction = figures(make_runner(True, lambda share: None), True)[name]()
    assert len(reproduction.table)
    assert all(claim.ours is not None for claim in reproduction.claims)
