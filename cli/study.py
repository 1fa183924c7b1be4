"""``eldr-sim study``: figures and claims of a YAML file, and what ``reproduce`` shares with it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pyarrow import csv

from eldr_sim.cli.console import number_text, print_table, progress_bar, value_text
from eldr_sim.cli.option import option, output, with_pictures
from eldr_sim.cli.options import check_out
from eldr_sim.kinds import Progress
from eldr_sim.planning.studies.figures import (
    Claim,
    Reproduction,
    Runner,
    choose,
    claims_table,
    write_reproduction,
)
from eldr_sim.planning.studies.study import read_study
from eldr_sim.simulator.results import result_folder, write_json

#: Columns of a table that a terminal shows.
_MOST_COLUMNS = 11


@click.group(short_help="Run a study: figures and claims from a YAML file.")
def study() -> None:
    """Run figures of many runs, and hold claims against them."""


@study.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="STUDY.yaml")
@click.argument("figure", nargs=-1)
@output("Write figures here.", "the figures in --out")
@option("--quick", bool, "Fewer and shorter runs, as the study says.")
@option("--jobs", int, "Runs at a time.  [default: one a CPU]", metavar="N")
def run(
    file: Path,
    figure: tuple[str, ...],
    out: Path | None,
    force: bool,
    quick: bool,
    jobs: int | None,
) -> None:
    """Run each FIGURE of STUDY.yaml, or all.

    Prints a line for each claim. With --out, each figure is a picture and a CSV, and claims.csv
    has the verdicts. docs/studies.md describes the file; studies/eldr/study.yaml is an example."""
    content = read_study(file).shortened(quick)

    def known(progress: Progress) -> dict[str, Callable[[], Reproduction]]:
        return content.known(Runner(content.base, jobs, progress))

    about = {"study": str(file), "title": content.title, "quick": quick, "seeds": content.seeds}
    run_figures(content.title, known, figure, out, force, about)


def run_figures(
    title: str,
    figures: Callable[[Progress], dict[str, Callable[[], Reproduction]]],
    chosen: tuple[str, ...],
    out: Path | None,
    force: bool,
    about: dict[str, Any],
) -> None:
    """Make the chosen figures, print their claims, and write them.

    Args:
        title: of the progress bar.
        figures: returns the functions that make each figure, given where to report progress.
        chosen: names of figures; all if empty.
        out: the folder to write; None: none.
        force: whether to replace it.
        about: the content of ``summary.json``, to which the names of figures are added."""
    check_out(out, force)
    with_pictures(out is not None)
    made: list[Reproduction] = []
    with progress_bar(title) as update:
        known = figures(update)
        for name in choose(chosen, known):
            start = time.perf_counter()
            made.append(known[name]())
            click.echo(f"{name}: {time.perf_counter() - start:.1f} s", err=True)
    for reproduction in made:
        _show(reproduction)
    if out is not None:
        with result_folder(out, force) as folder:
            for reproduction in made:
                write_reproduction(folder, reproduction)
            csv.write_csv(claims_table(made), folder / "claims.csv")
            write_json(folder / "summary.json", about | {"figures": [r.name for r in made]})
        click.echo(f"Wrote {out}")


def _show(reproduction: Reproduction) -> None:
    """Print a figure's claims, or its table where the paper claims nothing."""
    title = f"{reproduction.name}: {reproduction.title}"
    if reproduction.claims:
        columns = ["claim", "paper", "ours", "direction", "size", "why"]
        print_table(title, columns, [_row(claim) for claim in reproduction.claims])
    else:
        table = reproduction.table
        shown = table.select(table.column_names[:_MOST_COLUMNS])
        rows = [[value_text(value) for value in row.values()] for row in shown.to_pylist()]
        print_table(title, shown.column_names, rows)
        if table.num_columns > shown.num_columns:
            more = table.num_columns - shown.num_columns
            click.echo(f"{more} more columns are in the CSV that --out writes.")
    click.echo()


def _row(claim: Claim) -> list[str]:
    span = f"{claim.low:g}" if claim.low == claim.high else f"{claim.low:g} to {claim.high:g}"
    paper = f"{span} {claim.unit}".strip() if claim.stated else "no figure"
    ours, why = number_text(claim.ours, ".2f"), "" if claim.size == "agrees" else claim.reason
    return [claim.statement, paper, ours, claim.direction, claim.size, why]
