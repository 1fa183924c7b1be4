"""``eldr-sim serve``: OpenAI's API, answered by a simulated cluster."""

from pathlib import Path
from typing import Any

import click
from click import FloatRange, IntRange

from eldr_sim.cli.groups import GroupedCommand
from eldr_sim.cli.option import option, output
from eldr_sim.cli.options import check_out, config_from_options, run_options
from eldr_sim.errors import InputError

_FILE = click.Path(dir_okay=False, path_type=Path)
_OF_SERVICE = ("speed", "max_queue", "start_up_s", "tokenizer", "log")


@click.command(cls=GroupedCommand, short_help="Serve OpenAI's API from a simulated cluster.")
@option("--host", default="127.0.0.1", metavar="ADDRESS")
@option("--port", IntRange(0, 65535), "Port of the whole cluster; 0 takes a free one.",
        default=8000, metavar="N")  # fmt: skip
@option("--engine-ports", IntRange(1, 65535), "A port a worker of an xC cluster instead, from N "
        "on: another router chooses.", metavar="N")  # fmt: skip
@option("--speed", FloatRange(0.0, min_open=True), "Simulated seconds a second.", default=1.0,
        metavar="X")  # fmt: skip
@option("--max-queue", IntRange(1), "Requests that may wait; beyond them the answer is 429.  "
        "[default: any number]", metavar="N")  # fmt: skip
@option("--start-up start_up_s", FloatRange(0.0), "Seconds until it is healthy, as an engine that "
        "loads weights.", default=0.0, metavar="S")  # fmt: skip
@option("--tokenizer", _FILE, "A tokenizer.json that counts prompts' tokens.  [default: four "
        "characters are one]", metavar="FILE")  # fmt: skip
@option("--log", _FILE, "Write what arrives, a line a request.", metavar="FILE")
@option("--replay", _FILE, "Run such a log again, and end.", metavar="LOG")
@output("Its result.", "the result in --out")
@run_options(without=("start_up",))
def serve(
    host: str,
    port: int,
    engine_ports: int | None,
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

    own = {name: options.pop(name) for name in _OF_SERVICE}
    config = config_from_options(options)
    if options.get("warmup") is None:
        config = config.replace(warmup=0)
    configs, ports = [config], [port]
    if engine_ports is not None:
        if config.n_prefill or own["log"] is not None:
            allowed = "xC without --log: workers that share nothing"
            raise InputError("engine_ports", f"of {config.topology}", allowed)
        ports = [engine_ports + n for n in range(config.n_decode)]
        configs = [config.replace(topology="1C", seed=config.seed + n) for n in range(len(ports))]
    what = "compiling, and drawing the model's routing where it is new"
    click.echo(f"Getting ready: {what}", err=True)
    services = [Service(each, **own) for each in configs]
    serve_all(services, host, ports, lambda line: click.echo(line, err=True))
