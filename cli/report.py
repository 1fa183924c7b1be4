"""``eldr-sim report``: results as one HTML page."""

from pathlib import Path

import click

from eldr_sim.cli.option import option
from eldr_sim.reports.page import write_report


@click.command(short_help="Make one HTML page of results.")
@click.argument(
    "folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path)
)
@option("--out", Path, "Page to write.", default=Path("report.html"), metavar="FILE")
@option("--force", bool, "Replace FILE.")
def report(folders: tuple[Path, ...], out: Path, force: bool) -> None:
    """Make one HTML page, complete without a network, of what the commands wrote with --out.

    DIR is the folder of a run, a comparison, a sweep or a plan; several runs stand side by side.
    """
    write_report(folders, out, force=force)
    click.echo(f"Wrote {out} ({out.stat().st_size / 1e3:,.0f} kB)")
