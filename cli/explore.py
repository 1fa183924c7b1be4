"""``eldr-sim explore``: clusters on a page with controls."""

from typing import Any

import click
from click import FloatRange, IntRange

from eldr_sim.cli.decorators import option
from eldr_sim.cli.run_options import GroupedCommand, config_from_options, run_options

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
