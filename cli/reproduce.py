"""``eldr-sim reproduce``: a paper's evaluation, run again."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from pyarrow import csv

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.options import check_out
from eldr_sim.errors import InputError
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.validation.reproduce.reproduction import (
    Claim,
    Reproduction,
    choose,
    claims_table,
    write_reproduction,
)

#: Columns of a table that a terminal shows.
_MOST_COLUMNS = 11


@click.group(short_help="Rerun a paper's evaluation.")
def reproduce() -> None:
    """Rerun a paper's evaluation and hold its claims against ours."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command what every reproduction can be told."""
    for option in (
        click.option("--quick", is_flag=True, help="Fewer and shorter runs."),
        click.option("--force", is_flag=True, help="Replace the reproduction in --out."),
        click.option(
            "--out", type=click.Path(path_type=Path), metavar="DIR", help="Write figures here."
        ),
        click.argument("figure", nargs=-1),
    ):
        command = option(command)
    return command


@reproduce.command()
@_options
@click.option(
    "--measured",
    is_flag=True,
    help="The cells that the authors measured on 24 MI300X and their Figures 10, 11 and 13 to 16, "
    "as they number them; also errors and slope.",
)
@click.option(
    "--kernels",
    type=click.Choice(["published", "derived"]),
    help="With --measured: MoE tables fitted to its round-robin cells, or from public kernel "
    "figures alone.  [default: published]",
)
def eldr(measured: bool, kernels: str | None, **options: Any) -> None:
    """ELDR: FIGURE is a number or a name such as table_2; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV.
    """
    if measured:
        kernels = kernels or "published"
        _reproduce(f"ELDR, measured ({kernels})", "eldr_measured", kernels=kernels, **options)
    elif kernels is not None:
        raise InputError("kernels", "without --measured", "--measured beside it")
    else:
        _reproduce("ELDR", "eldr", **options)


@reproduce.command()
@_options
def metro(**options: Any) -> None:
    """METRO: FIGURE is a number or a name such as replication; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV.
    """
    _reproduce("METRO", "metro", **options)


@reproduce.command()
@_options
def grace(**options: Any) -> None:
    """GRACE-MoE: FIGURE is a number or a name such as map; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV.
    """
    _reproduce("GRACE-MoE", "grace", **options)


@reproduce.command()
@_options
@click.option(
    "--log", metavar="FILE", help="Take lengths from a request log (BurstGPT, Azure, Mooncake)."
)
def gimbal(**options: Any) -> None:
    """Gimbal: FIGURE is a number or a name such as sjf_sign; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV.
    """
    _reproduce("Gimbal", "gimbal", **options)


@reproduce.command(name="moe-prefill")
@_options
def moe_prefill(**options: Any) -> None:
    """MoE-Prefill: FIGURE is a number or a name such as table_1; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV.
    """
    _reproduce("MoE-Prefill", "moe_prefill", **options)


def _reproduce(
    paper: str,
    module: str,
    figure: tuple[str, ...],
    out: Path | None,
    force: bool,
    quick: bool,
    **own: Any,
) -> None:
    """Reproduce figures of a paper, whose folder in `validation.reproduce` says how.

    ``own`` is what this paper's command can be told besides.
    """
    check_out(out, force)
    evaluation = import_module(f"eldr_sim.validation.reproduce.{module}.evaluation")
    made: list[Reproduction] = []
    with progress_bar(paper) as update:
        runner = evaluation.make_runner(quick, update)
        known = evaluation.figures(runner, quick, **own)
        for name in choose(figure, known):
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
            write_json(
                folder / "summary.json",
                {"paper": paper, "quick": quick, "figures": [r.name for r in made]},
            )
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
        rows = [[_cell(value) for value in row.values()] for row in shown.to_pylist()]
        print_table(title, shown.column_names, rows)
        if table.num_columns > shown.num_columns:
            more = table.num_columns - shown.num_columns
            click.echo(f"{more} more columns are in the CSV that --out writes.")
    click.echo()


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _row(claim: Claim) -> list[str]:
    span = f"{claim.low:g}" if claim.low == claim.high else f"{claim.low:g} to {claim.high:g}"
    paper = f"{span} {claim.unit}".strip() if claim.stated else "no figure"
    ours = "-" if claim.ours is None else f"{claim.ours:.2f}"
    return [
        claim.statement,
        paper,
        ours,
        claim.direction,
        claim.size,
        "" if claim.size == "agrees" else claim.reason,
    ]
