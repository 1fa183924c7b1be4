"""``eldr-sim what-if``: one change at a time against a base run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click

from eldr_sim.cli import console
from eldr_sim.cli.option import jobs_option, option, output
from eldr_sim.cli.options import check_out
from eldr_sim.simulator.outcome.catalogue import label
from eldr_sim.simulator.setup.config.run_config import make_config

if TYPE_CHECKING:
    from eldr_sim.planning.compare.what_if import Change
    from eldr_sim.planning.runs.shared_runs import Summary


@click.command("what-if", short_help="Change one thing at a time in a run.")
@click.argument("base", type=click.Path(path_type=Path))
@option("--set changes", None, 'A change, such as decode.gpu=h200; repeat for more, each alone '
        'against the base. Fields that belong together are one change: "topology=8P12D '
        'policy.tau=0.2".', multiple=True, metavar="FIELD=VALUE")  # fmt: skip
@option("--together", bool, "Also make all changes at once.")
@option("--seeds", int, "Seeds, from the base's on.", default=5)
@jobs_option
@output("Write the figures.", "the result in --out")
def what_if(
    base: Path,
    changes: tuple[str, ...],
    together: bool,
    seeds: int,
    jobs: int | None,
    out: Path | None,
    force: bool,
) -> None:
    """Make changes to the run BASE, a result folder, its config.json or a YAML file.

    Base and changes run under the same seeds; differences come with 95% confidence intervals.
    """
    # The simulator takes long to import: --help and completion do without.
    from eldr_sim.planning.compare.what_if import MARKER, read_base
    from eldr_sim.planning.compare.what_if import what_if as make_what_if

    config = make_config(read_base(base))
    check_out(out, force, MARKER)
    with console.progress_bar("what if") as update:
        result = make_what_if(
            config, changes, n_seeds=seeds, together=together, jobs=jobs, progress=update
        )
    if out is not None:
        result.write(out, force=force)
    first = result.base[0]
    click.echo(
        f"Base: {config.policy}, {first['topology']}, {first['model_id']} on {first['gpu']}, "
        f"{first['weakest_provenance']} tables; {seeds} paired seed{'s' if seeds > 1 else ''}"
    )
    console.print_log_part(first)
    for change in result.changes:
        click.echo()
        _print_change(change)
    if out is not None:
        click.echo(f"Wrote {out}")
    for name, summary in [("base", first), *((c.name, c.summaries[0]) for c in result.changes)]:
        console.print_warnings(summary, f"{name}: ")


def _print_change(change: Change) -> None:
    rows = [
        [label(e.metric), _number(e.reference_mean), _number(e.mean), console.difference_cell(e)]
        for e in change.effects
        if e.reference_mean is not None or e.mean is not None
    ]
    columns = ["figure", "base", "changed", "difference, % [95% confidence interval]"]
    console.print_table(change.name, columns, rows)
    _print_faults(change.summaries)
    if change.other_requests:
        click.echo(
            f"Warning: {change.name}: {', '.join(change.other_requests)} makes other requests: "
            "pairs share their seed only",
            err=True,
        )


def _print_faults(summaries: Sequence[Summary]) -> None:
    """Print what each fault did, means over the seeds."""
    seeds = [summary.get("faults", {}).get("events", []) for summary in summaries]
    for events in zip(*seeds, strict=True):
        whens = ("before", "during", "after")
        means = (_mean(event[f"goodput_{when}"] for event in events) for when in whens)
        goodput = ", ".join(map("{} {}".format, means, whens))
        times = [event["time_to_recover_s"] for event in events]
        recovered = [time for time in times if time is not None]
        click.echo(
            f"{events[0]['event']}: goodput {goodput} req/s; {len(recovered)} of {len(times)} "
            f"seeds recover, in {_mean(recovered)} s"
        )


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _number(fmean(known) if known else None)


def _number(value: float | None) -> str:
    return console.number_text(value, ".4f" if value is not None and abs(value) < 10 else ".2f")
