"""Comparison of policies on the same requests, paired over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eldr_sim.errors import InputError
from eldr_sim.parquet import table_of
from eldr_sim.planning.compare.paired import PairedDifference, PairedRuns, headline_of, run_paired
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.policies import registry
from eldr_sim.simulator.outcome.catalogue import HEADLINE, Headline
from eldr_sim.simulator.results import Written
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.run_routing import servable

if TYPE_CHECKING:
    import pyarrow as pa

#: Policies that balance load and ignore experts (ELDR section 6, baselines).
LOAD_BALANCERS = ("random", "round_robin", "jsq", "p2c")


@dataclass(frozen=True, repr=False)
class Comparison(Written):
    """Policies under the same seeds, and their paired differences."""

    config: RunConfig  #: apart from its policy
    paired: PairedRuns  #: the summaries of each policy under each seed

    @property
    def summaries(self) -> dict[str, Summary]:
        """Summary of each policy under the first seed."""
        return {name: summaries[0] for name, summaries in self.paired.summaries.items()}

    @property
    def n_seeds(self) -> int:
        """Number of seeds."""
        return len(self.paired.summaries["round_robin"])

    def headline(self) -> Headline:
        """Return the means of the headline metrics of each policy."""
        first = next(iter(self.summaries.values()))
        title = f"{first['topology']}, mean over seeds ({self.n_seeds})"
        return headline_of(title, "policy", self.paired.summaries.items())

    @property
    def runs(self) -> pa.Table:
        """Headline metrics of every run, a row per policy and seed."""
        keys = (*HEADLINE, "num_prompts", "completed", "failed")
        rows = [
            {"policy": name, "seed": self.config.requests.seed + index}
            | {key: own[index][key] for key in keys}
            for index in range(self.n_seeds)
            for name, own in self.paired.summaries.items()
        ]
        return table_of(rows)

    @cached_property
    def best_load_balancer(self) -> str:
        """Load balancer with the lowest median TPOT, mean over the seeds."""

        def tpot(name: str) -> float:
            return sum(s["median_tpot_ms"] or math.inf for s in self.paired.summaries[name])

        names = [name for name in self.paired.summaries if name in LOAD_BALANCERS]
        return min(names, key=lambda name: (tpot(name), name))

    @cached_property
    def differences(self) -> list[PairedDifference]:
        """Differences of every policy from ``round_robin`` and from the best load balancer."""
        return [
            difference
            for reference in dict.fromkeys(("round_robin", self.best_load_balancer))
            for name in self.paired.summaries
            if name != reference
            for difference in self.paired.differences(name, reference, HEADLINE)
        ]

    def tables(self) -> dict[str, pa.Table]:
        """Return the metrics of every run."""
        return {"runs": self.runs}

    def record(self) -> dict[str, Any]:
        """Return the comparison as plain values, ready for JSON."""
        summaries, config = self.summaries, self.config.model_dump(mode="json")
        return {
            "config": {k: v for k, v in config.items() if k != "policy"},
            "seeds": self.n_seeds,
            "best_load_balancer": self.best_load_balancer,
            "differences": [
                {"policy": d.name, "reference": d.reference, "metric": d.metric, **d.record()}
                for d in self.differences
            ],
            "provenance": next(iter(summaries.values()))["provenance"],
            "summaries": summaries,
        }


def compare(
    config: RunConfig,
    policies: Sequence[str],
    n_seeds: int,
    *,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Comparison:
    """Run policies over the same requests and compare them; see `run_paired`.

    ``round_robin``, a reference, is added; a dense model's leave out policies that need experts.
    Raises InputError if a policy is unknown or listed twice, no worker decodes, or a run fails."""
    if not config.cluster.generates:
        problem = (
            f"{config.cluster.topology} has no workers that policies could choose for decoding"
        )
        allowed = "xPyD or xC; prefill policies: what-if --set prefill_policy=..."
        raise InputError("topology", problem, allowed)
    names = [
        registry.canonical("decode", policy) for policy in servable(config.engine.model, policies)
    ]
    if len(set(names)) != len(names):
        raise InputError("policies", f"{', '.join(names)} names a value twice")
    if "round_robin" not in names:
        names.insert(0, "round_robin")
    configs = {name: config.model_copy(update={"policy": name}) for name in names}
    return Comparison(config, run_paired(configs, n_seeds, jobs, progress))
