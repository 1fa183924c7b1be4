"""``eldr-sim explore``: a page whose controls are simulated while they are moved."""

from typing import Any

import click
from click import IntRange

from eldr_sim.cli.groups import GroupedCommand
from eldr_sim.cli.option import option
from eldr_sim.cli.options import config_from_options, run_options

#: What the page begins with, where options do not say it.
_START = {"topology": "2P4D", "request_rate": "12", "goodput": ("ttft:500,tpot:30",)}


@click.command(cls=GroupedCommand, short_help="Explore clusters on a page in the browser.")
@option("--port", IntRange(1, 65535), "Port to listen on.", default=8050, metavar="N")
@option("--host", default="127.0.0.1", metavar="ADDRESS")
@option("--read-only", bool, "Show what the options say, and nothing else.")
@run_options()
def explore(port: int, host: str, read_only: bool, **options: Any) -> None:
    """Serve a page on which model, GPUs, P and D, rate and policy are moved, and TTFT, TPOT,
    goodput and cost follow (docs/explore.md). Options say what it begins with.

    Needs `pip install 'eldr-sim[live]'`, and no network.
    """
    from eldr_sim.reports.explorer.server import explore as serve_page

    for name, value in _START.items():
        if options.get(name) in (None, ()) and not (options["config_file"] or options["preset"]):
            options[name] = value
    config = config_from_options(options)
    serve_page(
        config, host=host, port=port, read_only=read_only,
        announce=lambda line: click.echo(line, err=True),
    )  # fmt: skip
