"""``eldr-sim study``: figures and claims of a YAML file, and what ``reproduce`` shares with it."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click
from pyarrow import csv

from eldr_sim.cli.console import number_text, print_table, progress_bar, value_text
from eldr_sim.cli.decorators import option, output, with_pictures
from eldr_sim.cli.kept_runs import kept_runs, unfinished
from eldr_sim.cli.run_options import check_out
from eldr_sim.errors import InputError
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

Known: TypeAlias = dict[str, Callable[[], Reproduction]]
RESUME = "Continue an interrupted command for --out."
#: Columns of a table that a terminal shows.
_MOST_COLUMNS = 11


@click.group(short_help="Run a study: figures and claims from a YAML file.")
def study() -> None:
    """Run the figures of a study, and check its claims."""


@study.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="STUDY.yaml")
@click.argument("figure", nargs=-1)
@output("Folder for the figures.", "the figures in --out")
@option("--resume", bool, RESUME)
@option("--quick", bool, "Use the study's fewer and shorter runs.")
@option("--jobs", int, "Number of runs at a time.  [default: number of CPUs]", metavar="N")
def run(
    file: Path,
    figure: tuple[str, ...],
    out: Path | None,
    force: bool,
    resume: bool,
    quick: bool,
    jobs: int | None,
) -> None:
    """Run each FIGURE of STUDY.yaml, or all.

    Prints a line for each claim. With --out, each figure is a picture and a CSV, and claims.csv
    has the verdicts. docs/sweeps.md describes the file; studies/eldr/study.yaml is an example."""
    content = read_study(file).shortened(quick)

    def known(progress: Progress) -> tuple[Runner, Known]:
        runner = Runner(content.base, jobs, progress)
        return runner, content.known(runner)

    about = {"study": str(file), "title": content.title, "quick": quick, "seeds": content.seeds}
    run_figures(content.title, known, figure, out, force, about, resume=resume)


def run_figures(
    title: str,
    figures: Callable[[Progress], tuple[Runner, Known]],
    chosen: tuple[str, ...],
    out: Path | None,
    force: bool,
    about: dict[str, Any],
    *,
    resume: bool = False,
    expected: Callable[[Sequence[str]], int] | None = None,
) -> None:
    """Make the chosen figures; print the claims of each, and write it, as soon as it is made.

    Until all are made they stand in a folder beside ``out``, with the runs that have ended.

    Args:
        title: of the progress bar.
        figures: returns a runner, and the functions that make each figure by it, given where to
            report progress.
        chosen: names of figures; all if empty.
        out: the folder to write; None: none.
        force: whether to replace it.
        about: the content of ``summary.json``, to which the names of figures are added.
        resume: whether to go on with the runs of an interrupted command.
        expected: returns the number of runs that figures take; by default figures count alike."""
    if resume and out is None:
        raise InputError(
            "resume", "there are no runs to continue without --out", "together with --out DIR"
        )
    check_out(out, force)
    with_pictures(out is not None)
    reproductions: list[Reproduction] = []
    share = [0.0, 1.0]  # of the progress: before this figure, and of it
    with kept_runs(out, resume, "reproduction", about) as journal, progress_bar(title) as update:
        runner, named_figures = figures(lambda done: update(share[0] + done * share[1]))
        runner.keep(journal)
        names = choose(chosen, named_figures)
        if expected is not None:
            runner.expect(expected(names))
        for at, name in enumerate(names):
            if expected is None:
                share[:] = at / len(names), 1 / len(names)
            start = time.perf_counter()
            reproductions.append(named_figures[name]())
            click.echo(f"{name}: {time.perf_counter() - start:.1f} s", err=True)
            _show(reproductions[-1])
            if out is not None:
                write_reproduction(unfinished(out), reproductions[-1])
                csv.write_csv(claims_table(reproductions), unfinished(out) / "claims.csv")
        if out is not None:
            _write(out, force, reproductions, about)


def _write(out: Path, force: bool, made: list[Reproduction], about: Mapping[str, Any]) -> None:
    """Write all figures, whole or not at all."""
    with result_folder(out, force) as folder:
        for reproduction in made:
            write_reproduction(folder, reproduction)
        csv.write_csv(claims_table(made), folder / "claims.csv")
        write_json(folder / "summary.json", dict(about) | {"figures": [r.name for r in made]})
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
