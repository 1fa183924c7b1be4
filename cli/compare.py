"""``eldr-sim compare``: policies side by side on the same requests."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.options import config_from_options, run_options
from eldr_sim.errors import InputError
from eldr_sim.planning.compare import METRICS, Comparison, Difference
from eldr_sim.planning.compare import compare as compare_policies
from eldr_sim.simulator.catalogue import label
from eldr_sim.simulator.metrics import warnings_of
from eldr_sim.simulator.results import check_output, result_folder, write_json, write_table


@click.command(short_help="Compare policies on the same requests.")
@click.option(
    "--policies",
    default="random,round_robin,jsq,p2c,domain,eldr",
    show_default=True,
    metavar="NAME,NAME,...",
    help="Decode policies; round_robin is added as the reference where it is missing.",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="Seeds, from --seed on.")
@run_options(without=("policy", "artifact"))
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write the figures.")
@click.option("--force", is_flag=True, help="Replace the comparison in --out.")
def compare(policies: str, seeds: int, out: Path | None, force: bool, **options: Any) -> None:
    """Run policies over the same requests; print differences with 95% confidence intervals."""
    config = config_from_options(options)
    if force and out is None:
        raise InputError("force", "--force without --out", "--out DIR beside it")
    if out is not None:
        check_output(out, force)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    with progress_bar("comparing policies") as update:
        comparison = compare_policies(config, names, seeds, update)
    _print(comparison)
    if out is not None:
        with result_folder(out, force) as folder:
            write_table(folder / "runs.parquet", comparison.runs)
            write_json(
                folder / "summary.json",
                {
                    "config": config.model_dump(mode="json", exclude={"policy", "artifact"}),
                    "seeds": seeds,
                    "best_load_balancer": comparison.best_load_balancer,
                    "differences": [
                        {k: _or_none(v) for k, v in asdict(d).items()}
                        for d in comparison.differences
                    ],
                    "provenance": next(iter(comparison.summaries.values()))["provenance"],
                    "summaries": comparison.summaries,
                },
            )
        click.echo(f"Wrote {out}")
    for name, summary in comparison.summaries.items():
        for warning in warnings_of(summary):
            click.echo(f"Warning: {name}: {warning}", err=True)


def _print(comparison: Comparison) -> None:
    runs = comparison.runs.to_pylist()
    names = list(dict.fromkeys(row["policy"] for row in runs))
    rows = []
    for name in names:
        own = [row for row in runs if row["policy"] == name]
        cells = [_mean([row[metric] for row in own]) for metric in METRICS]
        rows.append([name, *cells, str(sum(row["failed"] for row in own))])
    n_seeds = len(runs) // len(names)
    first = next(iter(comparison.summaries.values()))
    print_table(
        f"Mean over {n_seeds} seed{'s' if n_seeds > 1 else ''}: {first['model_id']} on "
        f"{first['gpu']}, {first['topology']}, {first['weakest_provenance']} tables",
        ["policy", *(label(metric) for metric in METRICS), "failed"],
        rows,
    )
    references = list(dict.fromkeys(d.reference for d in comparison.differences))
    for reference in references:
        best = " (best load balancer)" if reference == comparison.best_load_balancer else ""
        rows = []
        for name in names:
            own = [
                d for d in comparison.differences if d.policy == name and d.reference == reference
            ]
            if own:
                rows.append([name, *(_cell(d) for d in own)])
        click.echo()
        print_table(
            f"Difference from {reference}{best}, % [95% confidence interval]",
            ["policy", *(label(metric) for metric in METRICS)],
            rows,
        )


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{math.fsum(known) / len(known):.2f}" if known else "-"


def _cell(difference: Difference) -> str:
    if math.isnan(difference.percent):
        return "-"
    if math.isnan(difference.low):
        return f"{difference.percent:+.2f}"
    return f"{difference.percent:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
