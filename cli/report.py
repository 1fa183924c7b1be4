"""``eldr-sim report`` and ``explain``: results on a page, in words."""

from collections.abc import Sequence
from pathlib import Path

import click

from eldr_sim.cli.console import print_table
from eldr_sim.cli.decorators import option, writes
from eldr_sim.errors import InputError
from eldr_sim.reports.explanation import (
    Explanation,
    explain_difference,
    explain_request,
    explain_run,
    open_run,
)
from eldr_sim.reports.folders import contents_of


@click.command(short_help="Make one HTML page of results.")
@click.argument("folders", nargs=-1, required=True, metavar="DIR...",
        type=click.Path(path_type=Path))  # fmt: skip
@writes("--out", Path, "HTML file to write.", default=Path("report.html"), metavar="FILE")
@option("--force", bool, "Replace the file in --out.")
def report(folders: tuple[Path, ...], out: Path, force: bool) -> None:
    """Make one HTML page, complete without a network, of what the commands wrote with --out.

    DIR is the folder of a run, comparison, what-if, sweep or plan; runs stand side by side."""
    from eldr_sim.reports.page import write_report  # takes long to import

    write_report(folders, out, force=force)
    click.echo(f"Wrote {out} ({out.stat().st_size / 1e3:,.0f} kB)")


@click.command(short_help="Say where time went in a run, or why two runs differ.")
@click.argument("result", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@option("--request", int, "Explain one request, next to the mean of similar ones.", metavar="ID")
def explain(result: Path, other: Path | None, request: int | None) -> None:
    """Say where the time of a run's requests went; of two runs, why their TTFT and TPOT differ.

    RESULT and OTHER are folders of eldr-sim run --out. The parts of a difference sum to it."""
    run = open_run(result)
    second = run if other is None else open_run(other)
    if other is not None and request is not None:
        raise InputError("request", "--request beside two results", "one result")
    parts: Sequence[Explanation]
    with contents_of(run, *([] if other is None else [second])):
        if other is not None:
            parts = explain_difference(run, second)
        elif request is not None:
            parts = [explain_request(run, request)]
        else:
            parts = [explain_run(run)]
    for part in parts:
        _print(part)


def _print(explanation: Explanation) -> None:
    for line in explanation.lines:
        click.echo(line)
    rows = [[_cell(value) for value in row] for row in explanation.rows]
    print_table("", list(explanation.columns), rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
