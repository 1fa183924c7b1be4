"""Gimbal's reproduction: its logs, its knee, the closed form of crossings, and its command."""

import csv
import json

import numpy as np
import pytest
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.planning.studies.figures import Runner
from eldr_sim.policies.placement.base import Placement
from eldr_sim.traces.requests.logs.request_logs import read_request_log
from studies.expert_traffic import Batch, measure
from studies.gimbal.evaluation import figures, make_runner
from studies.gimbal.latency import same_decisions
from studies.gimbal.prefix import GIMBAL_HITS, VLLM_HITS, t_test, write_conversations
from studies.gimbal.settings import P99, P99_TTFT_MS, QUICK, SHARES, SYSTEMS, Experiment
from studies.grace.settings import replica_choice

TINY = QUICK._replace(requests=24)


class Linear:
    """Runs nothing: p99 TTFT is so many ms for each request a second."""

    base = {"trace": "gpt-oss-20b"}  # noqa: RUF012

    def __init__(self, ms):
        self.ms, self.asked = ms, []

    def search(self, search):
        configs = next(search)
        while True:
            rate = configs[0].requests.request_rate
            self.asked.append(rate)
            assert configs[0].routing.trace == "gpt-oss-20b"  # of the runner, as all other runs
            try:
                configs = search.send([{P99: self.ms * rate}] * len(configs))
            except StopIteration as end:
                return end.value


def test_the_knee_is_where_round_robins_tail_reaches_its_bound():
    runner = Linear(ms=35.0)
    made = Experiment(runner, TINY)
    knee = made.knee("random")
    assert 0.97 * P99_TTFT_MS <= 35.0 * knee <= P99_TTFT_MS
    asked = len(runner.asked)
    cases = made.cases(SYSTEMS["Gimbal"], "random", SHARES[0], 3)
    assert len(runner.asked) == asked  # found once
    assert [case["request_rate"] for case in cases] == pytest.approx([SHARES[0] * knee] * 3)
    assert [case["eplb_interval"] for case in cases] == [TINY.interval] * 3
    assert len({case["workload"] for case in cases}) == 3


def test_a_seeds_log_is_the_same_for_all_systems_and_poisson():
    made = Experiment(Linear(1.0), QUICK._replace(requests=400))
    log = read_request_log(made.workload("two_end", 3))
    other = Experiment(Linear(1.0), made.scale)
    again = read_request_log(other.workload("two_end", 3))
    np.testing.assert_array_equal(log.prompt_len, again.prompt_len)
    np.testing.assert_array_equal(log.arrival_s, again.arrival_s)
    gaps = np.diff(log.arrival_s)
    assert stats.kstest(gaps, "expon").pvalue > 0.001
    rank = stats.spearmanr(np.arange(400), log.prompt_len)  # no order by length
    assert rank.pvalue > 0.001


def test_lengths_are_those_of_a_log_that_is_given(tmp_path):
    lines = [
        {"timestamp": 100 * i, "input_length": 7 + i, "output_length": 100 + i} for i in range(60)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = Experiment(Linear(1.0), TINY, str(tmp_path / "log.jsonl"))
    log = read_request_log(made.workload("random", 0))
    assert (log.output_len - log.prompt_len == 93).all()
    assert len(np.unique(log.prompt_len)) == TINY.requests
    with pytest.raises(InputError, match="num_requests"):
        made.workload("two_end", 1)


def test_conversations_go_on_with_their_own_prefix(tmp_path):
    write_conversations(tmp_path / "log.jsonl", 200, 1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(lines) == 200
    assert [line["timestamp_ms"] for line in lines] == sorted(
        line["timestamp_ms"] for line in lines
    )
    users = {}
    for line in lines:
        assert len(line["hash_ids"]) == line["input_length"] // 16
        before = users.get(line["session_id"])
        if before is not None:
            assert line["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
            assert line["input_length"] > before["input_length"] + before["output_length"]
        users[line["session_id"]] = line
    assert 1.3 < 200 / len(users) < 2.5
    fresh = [line["hash_ids"][0] for line in users.values() if line["hash_ids"]]
    assert len(set(fresh)) == len(fresh)  # users share nothing


def test_the_papers_prefix_gain_is_within_its_noise():
    t, p = t_test()
    assert t == pytest.approx(0.66, abs=0.005)
    same = stats.ttest_1samp(VLLM_HITS, GIMBAL_HITS)
    assert (-t, p) == pytest.approx((same.statistic, same.pvalue))


@pytest.mark.parametrize("ranks", [2, 4])
def test_crossings_are_the_same_under_every_placement(ranks):
    """A copy an expert: over all homes of a token, exactly k (G - 1) of k G pairs leave home."""
    tokens, layers, k = 12, 3, 8
    rng = np.random.default_rng(ranks)
    ids = rng.permuted(np.tile(np.arange(128), (tokens, layers, 1)), axis=2)[:, :, :k]
    batch = Batch(np.tile(ids, (ranks, 1, 1)), np.arange(ranks).repeat(tokens))
    for ranks_of in (
        rng.integers(ranks, size=(layers, 128)),  # any placement, unequal ones too
        np.zeros((layers, 128), np.int64),  # everything on the anchor
        np.broadcast_to(np.arange(128) * ranks // 128, (layers, 128)),
    ):
        placement = Placement.of_ranks(ranks_of, ranks)
        counted = measure([batch], placement, replica_choice("source"), np.zeros(ranks, int))
        assert (counted.inside_pairs == tokens * k * (ranks - 1)).all()


def test_printed_algorithm_1_is_round_robin_in_the_papers_experiment():
    """Byte by byte the same figures, with the engines' signals and at the knee's rate."""

    class Known(Experiment):
        def knee(self, shape, **more):
            return 10.0

    claim = same_decisions(Known(Runner({}, jobs=1), TINY))
    assert claim.ours == 0.0


def test_the_command_writes_figures_and_claims(run_cli, tmp_path):
    code, out, _ = run_cli("reproduce", "gimbal", "3", "--quick", "--out", tmp_path / "out")
    assert code == 0
    assert "layers 16, 18, 44, 45, 46" in out
    rows = list(csv.DictReader((tmp_path / "out" / "claims.csv").open()))
    assert {row["figure"] for row in rows} == {"figure_3"}
    assert (tmp_path / "out" / "figure_3.png").stat().st_size > 1000
    names = set(figures(make_runner(True, lambda _share: None), True))
    assert {f"figure_{n}" for n in (3, 4, *range(6, 13))} < names
