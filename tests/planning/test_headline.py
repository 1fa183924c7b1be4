"""What Python prints of a result, and what a notebook shows: a few figures, never all of it."""

import dataclasses

import pyarrow as pa
import pytest

from eldr_sim.planning.compare.policies import compare
from eldr_sim.planning.compare.what_if import what_if
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.runs.sweep import SweepResult, sweep
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.goals import Cheapest, HighestRate, find
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.outcome.catalogue import HEADLINE, MOST_ROWS, label, number
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import RunConfig

SHORT = RunConfig(topology="1P2D", request_rate=10, duration=2, warmup=1, output_len=10)


def check(result, *words):
    """A few lines that fit on a screen, with these words, also in a notebook."""
    text, html = repr(result), result._repr_html_()
    assert text.startswith(f"{type(result).__name__}: ")
    assert text.count("\n") <= MOST_ROWS + 2
    assert max(map(len, text.splitlines())) < 250
    assert [word for word in words if word not in text or word not in html] == []
    assert html.startswith("<table><caption>")


def test_run():
    result = simulate(SHORT)
    value = number(result.summary["median_tpot_ms"])
    check(result, "Qwen3-30B-A3B on H100", "Median TPOT (ms)", value)


def test_comparison_and_what_if():
    comparison = compare(SHORT, ["jsq"], 2, jobs=1)
    check(comparison, "round_robin", "jsq", *map(label, HEADLINE))
    runs = [s["median_tpot_ms"] for s in comparison.paired.summaries["jsq"]]
    assert number(sum(runs) / 2) in repr(comparison)
    changed = what_if(SHORT, ["policy=jsq"], n_seeds=1, jobs=1)
    check(changed, "base", "policy=jsq", *map(label, HEADLINE))


def test_sweep_shows_its_first_points():
    values = [*range(1, 14)]
    parameters = {"request_rate": values}
    swept = sweep(
        {
            "config": SHORT.model_dump(mode="json", exclude={"request_rate"}),
            "sweep": {"type": "grid", "parameters": parameters},
        },
        jobs=1,
    )
    check(swept, "13 points, 13 runs", "request_rate", f"and {13 - MOST_ROWS} more")
    failed = SweepResult(swept.points, pa.table({"a": [1], "runs_failed": [2]}), ["a"])
    check(failed, "1 points", "failed")


def test_plans():
    objective = Objective(parse_slo(["ttft:500,tpot:30"]), 0.9, (2,))
    load = SHORT.replace(topology="8P16D", duration=10)
    options = {"policies": ["jsq"], "tensor_parallel_sizes": [1]}
    planned = find(Space(load, max_gpus=3, **options), Cheapest(objective), RunCache(1))
    check(planned, "10 requests/s", "jsq", "H100", "1C", "SLO attainment")
    none = dataclasses.replace(planned, rows=(dataclasses.replace(planned.rows[0], trial=None),))
    check(none, "none")
    load = SHORT.replace(request_rate=None, duration=5)
    carried = find(Space(load, policies=["jsq"]), HighestRate(objective), RunCache(1))
    check(carried, "requests/s", "jsq", "1P2D")


def test_html_is_escaped():
    result = simulate(SHORT)
    evil = "<script>alert(1)</script>"
    shown = dataclasses.replace(result, summary={**result.summary, "policy": evil})
    assert evil not in shown._repr_html_()
    assert "&lt;script&gt;" in shown._repr_html_()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (3, "3"), (0.123456, "0.1235"), (23.456, "23.46"), (30464.4, "30464")],
)
def test_number(value, text):
    assert number(value) == text
