"""Autoscalers side by side on the same load, beside the best fixed fleet and a timetable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eldr_sim.errors import InputError
from eldr_sim.parquet import table_of
from eldr_sim.planning.compare.paired import run_paired
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.slo import mean_known, paired_percent
from eldr_sim.policies import registry
from eldr_sim.simulator.outcome.catalogue import Headline, number
from eldr_sim.simulator.results import Written
from eldr_sim.simulator.setup.config.run_config import RunConfig

if TYPE_CHECKING:
    import pyarrow as pa

_WELL = 0.95  #: the best fixed fleet is the cheapest one that serves this share of requests well
#: The figures of a rule, by the headings of their columns; means over seeds.
_FIGURES = {
    "gpu_hours": "GPU-hours", "slo_attainment": "attainment", "minutes_below_95": "minutes < 95%",
    "mean_ttft_ms": "mean TTFT (ms)", "p99_ttft_ms": "p99 TTFT (ms)",
    "gpu_hours_per_1000_good": "GPU-hours / 1,000 good", "starts": "starts", "stops": "stops",
    "switches": "switches", "reversals": "reversals",
}  # fmt: skip
#: Of these, what only an SLO judges.
_JUDGED = {"slo_attainment", "minutes_below_95", "gpu_hours_per_1000_good"}


@dataclass(frozen=True, repr=False)
class ScalingComparison(Written):
    """Figures of each rule, means over seeds; ``fixed``: the best fixed fleet. ``percent``,
    ``low``, ``high``: a rule's GPU-hours from that fleet's, with the 95% interval (None for one
    seed)."""

    config: RunConfig
    n_seeds: int
    fixed: str
    rules: dict[str, dict[str, float | None]]

    def headline(self) -> Headline:
        """Return a row a rule, the best fixed fleet marked."""
        shown = {
            tag: heading
            for tag, heading in _FIGURES.items()
            if self.config.output.goodput.given or tag not in _JUDGED
        }
        rows = [
            (
                f"{name}{' *' if name == self.fixed else ''}",
                f"{told['percent']:+.1f}"
                + ("" if told["low"] is None else f" [{told['low']:+.1f}, {told['high']:+.1f}]"),
                *(number(told[tag]) for tag in shown),
            )
            for name, told in self.rules.items()
        ]
        cluster = self.config.cluster
        title = f"{self.config.engine.model} on {cluster.gpu}, up to {cluster.topology}"
        if not self.config.output.goodput.given:
            title += ": no SLO is given, so * is the cheapest fixed fleet that completes 95%"
        columns = ("autoscaler", "GPU-hours from *, %", *shown.values())
        return Headline(f"{title}, mean over seeds ({self.n_seeds})", columns, rows)

    def record(self) -> dict[str, Any]:
        """Return the figures of all rules as plain values, ready for JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "seeds": self.n_seeds,
            "best_fixed": self.fixed,
            "autoscalers": self.rules,
        }

    def tables(self) -> dict[str, pa.Table]:
        """Return the figures, a row a rule."""
        rows = [{"autoscaler": name, **figures} for name, figures in self.rules.items()]
        return {"autoscalers": table_of(rows)}


def compare_autoscalers(
    config: RunConfig,
    rules: Sequence[str],
    n_seeds: int,
    *,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> ScalingComparison:
    """Run rules, every fixed fleet and a timetable; raises InputError as `simulate` does.

    Pools of fixed fleets are in proportion to the topology's; the best one takes the fewest
    GPU-hours of those that serve 95% of the requests within the SLO (without one: that complete
    95%), or serves most so."""
    names = [registry.canonical("scaling", rule) for rule in rules]
    if len(set(names)) != len(names) or "none" in names:
        problem = f"{', '.join(names)} names a value twice, or none"
        raise InputError("autoscale", problem, "rules, and none:n=5 for a fixed fleet")
    sizes = [pool.units[0] for pool in config.pools]
    fleets = [
        ",".join(str(math.ceil(size * k / max(sizes))) for size in sizes)
        for k in range(1, max(sizes) + 1)
    ]
    fixed = [registry.canonical("scaling", f"none:n={n}") for n in fleets]
    whole = dict.fromkeys([*names, registry.canonical("scaling", "timetable"), *fixed])
    configs = {name: config.replace(autoscale=name) for name in whole}
    runs = run_paired(configs, n_seeds, jobs, progress).summaries
    figures = {name: _figures(own) for name, own in runs.items()}

    def cost(name: str) -> tuple[bool, float]:
        hours, share = figures[name]["gpu_hours"] or 0.0, figures[name]["slo_attainment"]
        if not config.output.goodput.given:
            share = mean_known([s["completed"] / max(1, s["num_prompts"]) for s in runs[name]])
        share = share or 0.0
        return share < _WELL, hours if share >= _WELL else -share

    best = min(fixed, key=cost)
    for name in whole:
        ours, theirs = ([s["scaling"]["gpu_hours"] for s in runs[of]] for of in (name, best))
        ends = zip(("percent", "low", "high"), paired_percent(ours, theirs), strict=True)
        figures[name] |= {end: None if math.isnan(value) else value for end, value in ends}
    shown = [name for name in whole if name not in fixed or name in names or name == best]
    return ScalingComparison(config, n_seeds, best, {name: figures[name] for name in shown})


def _figures(runs: Sequence[Summary]) -> dict[str, float | None]:
    return {tag: mean_known([s["scaling"].get(tag, s.get(tag)) for s in runs]) for tag in _FIGURES}
