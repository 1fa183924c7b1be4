"""``eldr-sim reproduce``: a paper's evaluation, run again."""

from __future__ import annotations

import time
from pathlib import Path

import click
from pyarrow import csv

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.options import check_out
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.validation.eldr_evaluation import (
    choose,
    claims_table,
    figures,
    make_runner,
    write_reproduction,
)
from eldr_sim.validation.reproduction import Claim


@click.group(short_help="Rerun a paper's evaluation.")
def reproduce() -> None:
    """Rerun a paper's evaluation and hold its claims against ours."""


@reproduce.command()
@click.argument("figure", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write figures here.")
@click.option("--force", is_flag=True, help="Replace the reproduction in --out.")
@click.option("--quick", is_flag=True, help="Two rates and 20 s a run instead of five and 120 s.")
def eldr(figure: tuple[str, ...], out: Path | None, force: bool, quick: bool) -> None:
    """ELDR: FIGURE is a number or a name such as table_2; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV.
    """
    check_out(out, force)
    with progress_bar("ELDR") as update:
        runner = make_runner(quick, update)
        known = figures(runner, quick)
        made = []
        for name in choose(figure, known):
            start = time.perf_counter()
            made.append(known[name]())
            click.echo(f"{name}: {time.perf_counter() - start:.1f} s", err=True)
    for reproduction in made:
        title = f"{reproduction.name}: {reproduction.title}"
        if reproduction.claims:
            columns = ["claim", "paper", "ours", "direction", "size", "why"]
            print_table(title, columns, [_row(claim) for claim in reproduction.claims])
        else:
            rows = reproduction.table.to_pylist()
            print_table(title, list(rows[0]), [[_cell(v) for v in row.values()] for row in rows])
        click.echo()
    if out is not None:
        with result_folder(out, force) as folder:
            for reproduction in made:
                write_reproduction(folder, reproduction)
            csv.write_csv(claims_table(made), folder / "claims.csv")
            write_json(
                folder / "summary.json",
                {"paper": "ELDR", "quick": quick, "figures": [r.name for r in made]},
            )
        click.echo(f"Wrote {out}")


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _row(claim: Claim) -> list[str]:
    span = f"{claim.low:g}" if claim.low == claim.high else f"{claim.low:g} to {claim.high:g}"
    paper = f"{span} {claim.unit}".strip() if claim.stated else "no figure"
    ours = "-" if claim.ours is None else f"{claim.ours:.2f}"
    agrees = {True: "agrees", False: "differs", None: "-"}
    return [
        claim.statement,
        paper,
        ours,
        agrees[claim.direction_agrees],
        agrees[claim.size_agrees],
        "" if claim.size_agrees else claim.reason,
    ]
