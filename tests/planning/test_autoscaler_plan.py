"""The cheapest rule and fleet for a load that changes, against trying them all."""

import json
from itertools import chain
from types import SimpleNamespace

import pytest

from eldr_sim import RunConfig
from eldr_sim.errors import InputError
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.runs.runner import with_seed
from eldr_sim.planning.search import autoscaler_plan
from eldr_sim.planning.search.autoscaler_plan import _settings
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.day_workers import workers_by_period
from eldr_sim.planning.search.goals import CheapestFleet, find
from eldr_sim.planning.search.trial import try_cluster
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.reports.plan_section import plan_words
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.groups import parse_slo

pytestmark = pytest.mark.long

CONFIG = RunConfig(
    trace="reference-moe", topology="3C", policy="jsq", load="ladder:15,40,80,40,15@6",
    input_len=1000, output_len=16, start_up="0.3", max_num_seqs=16,
)  # fmt: skip
OBJECTIVE = Objective(parse_slo(["ttft:300"]), 0.9, (3,))
RULE = "seconds:interval=0.5,hold=1,memory=2"


@pytest.fixture(scope="module")
def answer():
    return find(
        Space(CONFIG),
        CheapestFleet(OBJECTIVE, rules=[RULE, "hpa:interval=0.5,down_s=2"], bounded=True),
        RunCache(1),
    )


def trial(runs, config):
    config = config.replace(goodput=OBJECTIVE.level)
    return runs.ended(try_cluster(config, OBJECTIVE))


def hours(found):
    return sum(s["scaling"]["gpu_hours"] for s in found.summaries) / len(found.summaries)


def test_the_fixed_fleet_is_the_smallest_that_meets(answer):
    runs = RunCache(1)
    meet = [
        n
        for n in (1, 2, 3)
        if trial(runs, CONFIG.replace(autoscale=f"none:n={n}")).verdict is Verdict.MEETS
    ]
    fixed = next(row for row in answer.rows if row.policy.startswith("none"))
    assert fixed.policy == f"none:n={min(meet)}"
    assert fixed.trial.config.cluster.topology == f"{min(meet)}C"


def test_a_rule_is_the_cheapest_of_all_its_fleets_and_settings(answer):
    row = next(row for row in answer.rows if row.policy.startswith("seconds"))
    runs, found, (first,) = RunCache(1), [], row.trial.config.scaling.initial_workers
    for least, most in ((1, 2), (1, 3), (2, 3)):
        for word in chain(*_settings(RULE, OBJECTIVE, 30.0, True)):
            config = CONFIG.replace(
                autoscale=word, topology=f"{most}C", min_workers=(least,),
                initial_workers=(max(least, first),),
            )  # fmt: skip
            each = trial(runs, config)
            found += [hours(each)] if each.verdict is Verdict.MEETS else []
    assert hours(row.trial) == row.figure.mean
    assert row.trial.verdict is Verdict.MEETS
    assert row.figure.mean <= min(found) * 1.02


def test_rows_are_runs_and_gains_are_paired_with_the_fixed_fleet(answer):
    best = answer.best
    assert best.figure.mean == min(row.figure.mean for row in answer.rows if row.figure)
    again = [simulate(with_seed(best.trial.config, n)).summary["scaling"] for n in range(3)]
    assert list(best.by_seed) == [each["gpu_hours"] for each in again]
    fixed = next(row for row in answer.rows if row.policy.startswith("none"))
    assert answer.gains
    for gain in answer.gains:
        assert gain.reference_by_seed == fixed.by_seed[: len(gain.by_seed)]
        ratios = [a / b for a, b in zip(gain.by_seed, gain.reference_by_seed, strict=True)]
        assert gain.gain.mean == pytest.approx(100 * (sum(ratios) / len(ratios) - 1))
    assert any(
        row.policy.startswith("timetable") or "timetable" in row.policy for row in answer.rows
    )


def test_it_is_told_as_every_plan_is(answer, tmp_path):
    answer.write(tmp_path / "plan")
    record = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert record["kind"] == "day"
    words = plan_words(record, narrow=True)
    told = dict(words["answer"])
    assert "GPU-hours" in told["Answer"]
    assert "on average within TTFT 300 ms for 90% of requests" in words["question"]
    assert answer.headline().rows


def test_workers_over_the_day_are_those_of_the_run(answer):
    """Ready workers by period, times their length, are the ready hours of the run's own count."""
    record = answer.record()
    assert [fleet["policy"].partition(":")[0] for fleet in record["day"]][1:] in (["timetable"], [])
    for fleet, row in zip(record["day"][:1], [answer.best], strict=True):
        scaling = row.trial.summaries[0]["scaling"]
        periods = fleet["periods"]
        counts = [n for period in periods for n in period["workers"].values()]
        most = row.trial.config.pools[0].workers
        assert counts
        assert all(0 <= n <= most for n in counts)
        arrived = sum(p["requests_per_s"] * (p["to_s"] - p["from_s"]) for p in periods)
        assert arrived == pytest.approx(sum(m["requests"] for m in scaling["by_minute"]))
    words = plan_words(record, narrow=True)["day"]
    assert len(words.rows) == len(record["day"][0]["periods"])


def test_a_period_has_the_mean_of_what_changes_in_it():
    scaling = {
        "by_minute": [{"from_s": 60.0 * n, "requests": 60} for n in range(48)],
        "replicas": {"decode": {"at_s": [0.0, 60.0, 2820.0], "ready": [1, 3, 2]}},
    }
    rows = workers_by_period(scaling)
    assert [(row["from_s"], row["to_s"]) for row in rows][:2] == [(0.0, 120.0), (120.0, 240.0)]
    assert rows[0]["workers"] == {"decode": 2.0}
    assert rows[1]["workers"] == {"decode": 3.0}
    assert rows[-1]["workers"] == {"decode": 2.5}
    assert len(rows) == 24
    assert rows[0]["requests_per_s"] == 1.0
    assert workers_by_period({"by_minute": [], "replicas": {}}) == []
    scaling |= {"replicas": {"decode": {"at_s": [], "ready": []}}, "mean_workers": {"decode": 2.0}}
    assert [row["workers"] for row in workers_by_period(scaling)] == [{"decode": 2.0}] * 24


def test_prices_make_it_dollars():
    found = find(
        Space(CONFIG, prices={"h100": 2.0}),
        CheapestFleet(OBJECTIVE, rules=[RULE], bounded=True),
        RunCache(1),
    )
    best = found.best
    used = [s["scaling"]["gpu_hours"] for s in best.trial.summaries]
    assert list(best.by_seed) == pytest.approx([2 * each for each in used])


def test_bounds_of_the_objective_become_those_of_rules():
    objective = Objective(parse_slo(["ttft:700,tpot:30"]))
    first = _settings("dynamo_load:itl=80", objective, 1e6, True)
    # What is told is not tuned; the leanest comes first.
    targets = 2800, 1400, 700, 490, 350, 245, 140
    assert first == [[f"dynamo_load:ttft={target}.0,itl=80.0" for target in targets]]
    # With switches and without, of late starts, too.
    assert len(_settings("seconds", objective, 1e6, False)) == 4
    assert len(_settings("seconds:spend=true", objective, 1e6, True)) == 1
    lines = _settings("timetable:utilisation=0.5", objective, 120.0, True)
    assert lines == [["timetable:interval=10.0,period=10.0,utilisation=0.5,itl=30.0"]]


def test_where_one_worker_serves_all_no_rule_is_run():
    found = find(
        Space(CONFIG.replace(load="ladder:9,12@6")),
        CheapestFleet(OBJECTIVE, rules=[RULE], bounded=True),
        RunCache(1),
    )
    assert found.best.policy == "none:n=1"
    assert "none can go" in found.rows[1].reasons[0]


def test_a_setting_that_meets_under_one_seed_alone_gives_way_to_the_next(monkeypatch):
    """The search under one seed passes over the second setting, the leanest that all accept."""
    words = [f"hpa:target={n}.0" for n in (64, 48, 32, 24, 16, 8)]
    monkeypatch.setattr(autoscaler_plan, "_settings", lambda *_: [words])
    monkeypatch.setattr(autoscaler_plan, "_mosts", lambda *_: [(0, 3)])
    monkeypatch.setattr(autoscaler_plan, "_leasts", lambda *_: [(0, 1)])

    def of(word, *_):
        return CONFIG.replace(autoscale=word, goodput=OBJECTIVE.level)

    def summary(config):
        n = words.index(config.scaling.autoscale)
        attained = 0.5 if n == 0 and config.requests.seed else 0.95 + n / 100
        scaling = {"gpu_hours": n + 1.0, "cost_per_1000_good": None}
        return {"slo_attainment": attained, "num_prompts": 10_000, "scaling": scaling}

    search = autoscaler_plan._best_of("hpa", SimpleNamespace(span_s=30.0, of=of), (0, 2), OBJECTIVE)
    configs, first = next(search), []
    while configs is not None:
        first += [config.scaling.autoscale for config in configs]
        try:
            configs = search.send([summary(config) for config in configs])
        except StopIteration as end:
            row, configs = end.value, None
    assert first[:3] == [words[3], words[2], words[0]]
    assert [trial.config.scaling.autoscale for trial in row.trials] == words[:2]
    assert row.trial.config.scaling.autoscale == words[1]


def test_a_load_that_no_fleet_serves_has_no_answer():
    found = find(
        Space(CONFIG.replace(load="ladder:300@6", topology="2C")),
        CheapestFleet(OBJECTIVE, rules=[RULE], bounded=True),
        RunCache(1),
    )
    assert found.best is None
    assert "always, attains only" in found.rows[0].reasons[0] or found.rows[0].reasons


@pytest.mark.parametrize(
    ("changes", "rules", "message"),
    [
        ({}, ["hpa", "hpa:target=16"], "twice"),
        ({}, ["none:n=2"], "a fixed fleet"),
        ({"min_workers": (2,)}, ["hpa"], "min_workers"),
        ({"topology": "2P"}, ["hpa"], "xPyD or xC"),
    ],
)
def test_bad_questions(changes, rules, message):
    with pytest.raises(InputError, match=message):
        find(
            Space(CONFIG.replace(**changes)),
            CheapestFleet(OBJECTIVE, rules=rules, bounded=True),
            RunCache(1),
        )


def test_the_command(run_cli, tmp_path):
    options = (
        "plan", "--load", "ladder:15,40,80,40,15@6", "--slo", "ttft:300", "--attainment", "0.9",
        "--trace", "reference-moe", "--input-len", "1000", "--output-len", "16", "--policy", "jsq",
        "--max-num-seqs", "16", "--start-up", "0.3", "--seeds", "3", "--jobs", "1",
    )  # fmt: skip
    code, out, _ = run_cli(
        *options, "--autoscale", RULE, "--max-gpus", 3, "--tensor-parallel-size", 1
    )
    assert code == 0
    assert "GPU-hours" in out.splitlines()[2]
    for more, field in (
        (("--gpus", "4"), "load"),
        (("--emit", tmp_path / "x"), "emit"),
        (("--sensitivity",), "sensitivity"),
        (("--min-workers", "2"), "min_workers"),
    ):
        code, _, err = run_cli(*options, *more)
        assert (code, err.split(":")[1].strip()) == (2, field), err
