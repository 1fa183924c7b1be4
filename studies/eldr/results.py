"""ELDR section 6: runs of policies at rates, and Figure 14; the other main results are in
``study.yaml``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from eldr_sim.charts import bars
from eldr_sim.planning.compare.policies import LOAD_BALANCERS
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner, percent

P50, P99, TTFT = "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms"
ACTIVE_BY_TOKEN = "mean_active_experts_per_token"

SummaryGrid = dict[tuple[str, float], Summary]


def run_grid(
    runner: Runner, policies: Sequence[str], rates: Sequence[float], **fields: Any
) -> SummaryGrid:
    """Run policies at rates; returns summaries by (policy, rate)."""
    keys = [(policy, rate) for rate in rates for policy in policies]
    cases = [{"policy": policy, "request_rate": rate, **fields} for policy, rate in keys]
    return dict(zip(keys, runner.run(cases), strict=True))


def mean_difference(runs: SummaryGrid, policy: str, reference: str, metric: str) -> float:
    """Return the difference of two policies in %, mean over the rates."""
    rates = sorted({rate for _, rate in runs})
    percents = [
        percent(runs[policy, r][metric], _reference(runs, reference, r)[metric]) for r in rates
    ]
    return math.fsum(percents) / len(percents)


def _reference(runs: SummaryGrid, name: str, rate: float) -> Summary:
    """Return a policy's summary; ``best`` is the load balancer of the lowest median TPOT."""
    if name != "best":
        return runs[name, rate]
    own = [runs[policy, rate] for policy in LOAD_BALANCERS]
    return min(own, key=lambda summary: float(summary[P50]))


Cells = dict[tuple[str, str], list[float]]


def variants(
    runner: Runner,
    rates: Sequence[float],
    cases: dict[str, str],
    models: Sequence[str],
    trace_of: Callable[[str, str], str] | None = None,
) -> tuple[list[dict[str, Any]], Cells]:
    """Run variants of eldr against round_robin in a figure's cells, models times workloads: rows,
    and by (variant, metric) the cells' mean differences, %. ``trace_of``: where traces are not
    default."""
    rows: list[dict[str, Any]] = []
    cells: Cells = {}
    for model in models:
        for workload in ("task", "language"):
            fields = {"workload": workload, "model": model}
            if trace_of is not None:
                fields["trace"] = trace_of(model, workload)
            reference = run_grid(runner, ("round_robin",), rates, **fields)
            for name, policy in cases.items():
                runs = reference | run_grid(runner, (policy,), rates, **fields)
                row: dict[str, Any] = {"variant": name, "model": model, "workload": workload}
                for metric in (P50, P99, ACTIVE_BY_TOKEN):
                    value = mean_difference(runs, policy, "round_robin", metric)
                    cells.setdefault((name, metric), []).append(value)
                    row[f"{metric}_percent"] = value
                rows.append(row)
    return rows, cells


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.1f}" for value in values)


def _of_variants(
    name: str, title: str, rows: list[dict[str, Any]], claims: list[Claim]
) -> Reproduction:
    shown = (f"{P50}_percent", f"{P99}_percent")
    draw = bars(rows, "variant", shown, ("model", "workload"), label="% against round_robin")
    return Reproduction(name, title, rows, claims, draw)


def figure_14(
    runner: Runner, rates: Sequence[float], models: Sequence[str], scored: Callable[[str, str], str]
) -> Reproduction:
    """Gain of count-idf over other transforms (section 6.3); ``scored``: traces with gate
    scores."""
    names = ("count-idf", "count", "binary", "gate-prob")
    cases = {name: f"eldr:signature={name}" for name in names}
    rows, cells = variants(runner, rates[len(rates) // 2 :][:1], cases, models, scored)

    def beyond(name: str) -> list[float]:
        both = zip(cells["count-idf", P50], cells[name, P50], strict=True)
        return [idf - other for idf, other in both]

    ours = beyond("gate-prob")
    reason = (
        f"by cell: {_each(ours)} points; drawn scores are those by which the experts were chosen, "
        f"a gate's may be on another scale; against plain count: {_each(beyond('count'))}"
    )
    claims = [
        Claim("count-idf over gate-prob, median TPOT, mean of the cells", -3.0, -3.0,
              math.fsum(ours) / len(ours), "points", reason=reason)
    ]  # fmt: skip
    return _of_variants("figure_14", "Signature choice", rows, claims)
