"""``eldr-sim serve``: OpenAI's API, answered by a simulated cluster."""

from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.groups import GroupedCommand
from eldr_sim.cli.options import check_out, config_from_options, run_options
from eldr_sim.errors import InputError

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=GroupedCommand, short_help="Serve OpenAI's API from a simulated cluster.")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, metavar="N",
    help="Port of the whole cluster; 0 takes a free one.",
)  # fmt: skip
@click.option(
    "--engine-ports", type=click.IntRange(1, 65535), metavar="N",
    help="A port a worker of an xC cluster instead, from N on: another router chooses.",
)  # fmt: skip
@click.option(
    "--speed", type=click.FloatRange(0.0, min_open=True), default=1.0, show_default=True,
    metavar="X", help="Simulated seconds a second.",
)  # fmt: skip
@click.option(
    "--max-queue", type=click.IntRange(1), metavar="N",
    help="Requests that may wait; beyond them the answer is 429.  [default: any number]",
)  # fmt: skip
@click.option(
    "--start-up", "start_up_s", type=click.FloatRange(0.0), default=0.0, metavar="S",
    help="Seconds until it is healthy, as an engine that loads weights.",
)  # fmt: skip
@click.option(
    "--tokenizer", type=_FILE, metavar="FILE",
    help="A tokenizer.json that counts prompts' tokens.  [default: four characters are one]",
)  # fmt: skip
@click.option("--log", type=_FILE, metavar="FILE", help="Write what arrives, a line a request.")
@click.option("--replay", type=_FILE, metavar="LOG", help="Run such a log again, and end.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Its result.")
@click.option("--force", is_flag=True, help="Replace the result in --out.")
@run_options()
def serve(
    host: str,
    port: int,
    engine_ports: int | None,
    speed: float,
    max_queue: int | None,
    start_up_s: float,
    tokenizer: Path | None,
    log: Path | None,
    replay: Path | None,
    out: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Serve OpenAI's API with the latencies of a simulated cluster (docs/serve.md).

    /v1/completions and /v1/chat/completions, streamed or not, /v1/models, /health and /metrics in
    vLLM's names, until it is told to stop. Needs `pip install 'eldr-sim[live]'`.
    """
    if replay is not None:
        from eldr_sim.cli.console import print_summary
        from eldr_sim.serving.simulated.core import replay as run_again
        from eldr_sim.simulator.results import write_result

        check_out(out, force)
        result = run_again(replay)
        if out is not None:
            write_result(result, out, force=force)
        print_summary(result.summary)
        return
    if out is not None:
        raise InputError("out", "--out without --replay", "--log FILE, and --replay FILE after it")
    from eldr_sim.serving.simulated.server import Service
    from eldr_sim.serving.simulated.server import serve as serve_all

    config = config_from_options(options)
    if options.get("warmup") is None:
        config = config.replace(warmup=0)
    configs, ports = [config], [port]
    if engine_ports is not None:
        if config.n_prefill or log is not None:
            allowed = "xC without --log: workers that share nothing"
            raise InputError("engine_ports", f"of {config.topology}", allowed)
        ports = [engine_ports + n for n in range(config.n_decode)]
        configs = [config.replace(topology="1C", seed=config.seed + n) for n in range(len(ports))]
    click.echo(
        "Getting ready: compiling, and drawing the model's routing where it is new", err=True
    )
    services = [
        Service(
            own, speed=speed, max_queue=max_queue, start_up_s=start_up_s, tokenizer=tokenizer,
            log=log,
        )
        for own in configs
    ]  # fmt: skip
    serve_all(services, host, ports, lambda line: click.echo(line, err=True))
