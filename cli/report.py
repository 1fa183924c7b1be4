"""``eldr-sim report``, ``explain`` and ``explore``: results on a page, in words, on controls."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click import FloatRange, IntRange

from eldr_sim.cli.console import print_table
from eldr_sim.cli.decorators import option, writes
from eldr_sim.cli.run_options import GroupedCommand, config_from_options, run_options
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


#: What the page begins with, where options do not say it.
_START = {"topology": "2P4D", "request_rate": "12", "goodput": ("ttft:500,tpot:30",)}
#: The same of the default model and GPU: half of the requests are within the service level, and one
#: decode worker more or less decides.
_LOADED = {"topology": "2P3D", "request_rate": "44", "goodput": ("ttft:300,tpot:25",)}
#: Options that make another question of it.
_OTHERS = ("model", "gpu", "workload", "engine", "topology", "tensor_parallel_size", "input_len",
           "output_len", "request_rate")  # fmt: skip


@click.command(cls=GroupedCommand, short_help="Explore clusters on a page in the browser.")
@option("--port", IntRange(1, 65535), "Port that the page is served at.", default=8050, metavar="N")
@option("--host", None, "Address to listen on; 0.0.0.0 for all.", default="127.0.0.1",
        metavar="ADDRESS")  # fmt: skip
@option("--read-only", bool, "Show the cluster of the options, without controls.")
@option("--allowed-host", None, "A name that requests may use for this server, besides IP "
        "addresses, localhost and the machine's name: gpu7, .example.com, * for any; repeat for "
        "more.", multiple=True, metavar="NAME")  # fmt: skip
@option("--point-timeout", FloatRange(0.0, min_open=True), "Maximum time for a point, s.",
        default=120.0, metavar="S")  # fmt: skip
@option("--point-memory-gib", FloatRange(0.5), "Maximum memory of a process that computes points, "
        "GiB.", default=4.0, metavar="GIB")  # fmt: skip
@option("--point-requests", IntRange(1), "Maximum number of requests in a point.", default=20_000,
        metavar="N")  # fmt: skip
@run_options()
def explore(
    port: int,
    host: str,
    read_only: bool,
    allowed_host: tuple[str, ...],
    point_timeout: float,
    point_memory_gib: float,
    point_requests: int,
    **options: Any,
) -> None:
    """Serve a page with sliders for model, GPUs, prefill and decode workers, rate and policy that
    shows TTFT, TPOT, goodput and cost (docs/explore.md). Options set the first cluster.

    Needs `pip install 'eldr-sim[live]'`, and no network."""
    from eldr_sim.reports.explorer.processes import PointLimits
    from eldr_sim.reports.explorer.server import explore as serve_page

    loaded = all(options.get(name) in (None, ()) for name in _OTHERS)
    for name, value in (_LOADED if loaded else _START).items():
        if options.get(name) in (None, ()) and not (options["config_file"] or options["preset"]):
            options[name] = value
    config = config_from_options(options)
    serve_page(
        config, host=host, port=port, read_only=read_only, allowed_host=allowed_host,
        limits=PointLimits(point_timeout, point_memory_gib, point_requests),
        announce=lambda line: click.echo(line, err=True),
    )  # fmt: skip
