"""``eldr-sim serve``, a simulated cluster behind OpenAI's API; ``router``, before real engines."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click import FloatRange, IntRange

from eldr_sim.cli.option import complete, option, output, policies, together
from eldr_sim.cli.options import GroupedCommand, check_out, config_from_options, run_options
from eldr_sim.errors import InputError

_FILE = click.Path(dir_okay=False, path_type=Path)
_MIB = FloatRange(0.0, min_open=True)


def _http_options(command: Any) -> Any:
    """Add the options that both servers have."""
    return together(
        option("--allowed-host", None, "A name that requests may use for this server, besides IP "
               "addresses, localhost and the machine's name: gpu7, .example.com, * for any; "
               "repeat for more.", multiple=True, metavar="NAME"),
        option("--max-concurrent-requests", IntRange(1), "Requests in progress; beyond them the "
               "answer is 429.", default=4096, metavar="N"),
        option("--max-body-mib", _MIB, "Largest body of a request.", default=64.0, metavar="MIB"),
        option("--max-buffered-mib", _MIB, "Bodies and unstreamed answers in memory, in all; "
               "beyond them the answer is 503.", default=1024.0, metavar="MIB"),
        option("--grace-period grace_period_s", FloatRange(0.0), "Seconds that requests in "
               "progress have to end after SIGTERM.", default=180.0, metavar="S"),
    )(command)  # fmt: skip


_OF_SERVICE = ("speed", "max_queue", "ready_after_s", "tokenizer", "log")


@click.command(cls=GroupedCommand, short_help="Serve OpenAI's API from a simulated cluster.")
@option("--host", default="127.0.0.1", metavar="ADDRESS")
@option("--port", IntRange(0, 65535), "Port of the whole cluster; 0 takes a free one.",
        default=8000, metavar="N")  # fmt: skip
@option("--engine-ports", IntRange(1, 65535), "A port for each worker of an xC cluster instead, "
        "from N on: another router chooses.", metavar="N")  # fmt: skip
@option("--engine-header", None, "A header that names the worker of an xC cluster, 0 and on, at "
        "the one port: another router chooses.", metavar="NAME")  # fmt: skip
@option("--admin-port", IntRange(1, 65535), "A port on the loopback address that slows, hangs, "
        "kills and drains workers on request (docs/serve.md).", metavar="N")  # fmt: skip
@option("--kv-events-config", None, "vLLM's option: publishes KV events, worker n at the ports "
        "plus n.", metavar="JSON")  # fmt: skip
@option("--lora-modules adapters", None, "Name of a LoRA adapter, which costs what the model "
        "costs; repeat for more.", multiple=True, metavar="NAME[=PATH]")  # fmt: skip
@option("--speed", FloatRange(0.0, min_open=True), "Simulated seconds a second.", default=1.0,
        metavar="X")  # fmt: skip
@option("--max-queue", IntRange(1), "Requests that may wait; beyond them the answer is 429.  "
        "[default: any number]", metavar="N")  # fmt: skip
@option("--ready-after ready_after_s", FloatRange(0.0), "Seconds until /health answers 200, as of "
        "an engine that loads weights.", default=0.0, metavar="S")  # fmt: skip
@option("--tokenizer", _FILE, "A tokenizer.json that counts prompts' tokens.  [default: four "
        "characters are one]", metavar="FILE")  # fmt: skip
@_http_options
@option("--log", _FILE, "Append what arrives, a line a request.", metavar="FILE")
@option("--replay", _FILE, "Run such a log again, and end.", metavar="LOG")
@output("Its result.", "the result in --out")
@run_options(seldom="requests")
def serve(
    host: str,
    port: int,
    engine_ports: int | None,
    replay: Path | None,
    out: Path | None,
    force: bool,
    allowed_host: tuple[str, ...],
    grace_period_s: float,
    engine_header: str | None,
    admin_port: int | None,
    kv_events_config: str | None,
    adapters: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve OpenAI's API with the latencies of a simulated cluster (docs/serve.md).

    Completions, chat and responses, streamed or not, /tokenize, /v1/models, /health and /metrics as
    vLLM and SGLang name them, until it is stopped. Needs `pip install 'eldr-sim[live]'`."""
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
    from eldr_sim.guard import Guard
    from eldr_sim.serving.http import Intake, Limits, listen
    from eldr_sim.serving.simulated.admin import Admin, serving
    from eldr_sim.serving.simulated.kv_events import parse_kv_events
    from eldr_sim.serving.simulated.server import Service
    from eldr_sim.serving.simulated.server import serve as serve_all

    own = {name: options.pop(name) for name in _OF_SERVICE}
    guard = own["guard"] = Guard(host, allowed_host)
    intake = Intake(Limits(*(options.pop(name) for name in Limits._fields)))
    own["adapters"] = [name.partition("=")[0] for name in adapters]
    own["kv_events"] = None if kv_events_config is None else parse_kv_events(kv_events_config)
    config = config_from_options(options)
    if options.get("frontend") is None:
        config = config.replace(frontend="none")  # this server is a real one
    if options.get("warmup") is None:
        config = config.replace(warmup=0)
    configs, ports = [config], [port]
    if engine_ports is not None or engine_header is not None:
        if engine_ports is not None and engine_header is not None:
            raise InputError("engine_header", "beside --engine-ports", "one of them")
        if config.cluster.n_prefill or own["log"] is not None:
            allowed = "xC without --log: workers that share nothing"
            field = "engine_ports" if engine_header is None else "engine_header"
            raise InputError(field, f"of {config.cluster.topology}", allowed)
        n = range(config.cluster.n_decode)
        configs = [
            config.replace(topology="1C", seed=config.requests.seed + worker) for worker in n
        ]
        if engine_ports is not None:
            ports = [engine_ports + worker for worker in n]
    what = "compiling, and drawing the model's routing where it is new"
    click.echo(f"Getting ready: {what}", err=True)
    services = [
        Service(each, intake=intake, rank=worker, **own) for worker, each in enumerate(configs)
    ]
    beside = None
    if admin_port is not None:
        beside = partial(serving, Admin(services), listen("127.0.0.1", admin_port))
        click.echo(f"Faults at http://127.0.0.1:{admin_port}/workers", err=True)
    serve_all(
        services, host, ports, lambda line: click.echo(line, err=True), grace_period_s,
        header=engine_header, guard=guard, beside=beside,
    )  # fmt: skip


_Command = TypeVar("_Command", bound=Callable[..., object])
_SECONDS = click.FloatRange(0.0, min_open=True)


def _timed(name: str, default: float, text: str) -> Callable[[_Command], _Command]:
    return click.option(f"--{name}", type=_SECONDS, default=default, metavar="S", help=text)


@click.command(short_help="Route requests to real engines by a policy.")
@option("--decode decode_urls", None, "An engine that answers; repeat for more. Without --prefill "
        "it computes prompts, too.", multiple=True, required=True, metavar="URL")  # fmt: skip
@option("--prefill prefill_urls", None, "An engine that computes prompts for them (NIXL); repeat "
        "for more.", multiple=True, metavar="URL")  # fmt: skip
@option("--policy", None, "Chooses the decode engine.", default="jsq", metavar="NAME[:P=V,...]",
        shell_complete=complete(policies("decode")))  # fmt: skip
@option("--prefill-policy", None, "Chooses the prefill engine.", default="least_loaded",
        metavar="NAME[:P=V,...]", shell_complete=complete(policies("prefill")))  # fmt: skip
@option("--capture", None, "ELDR_SIM_CAPTURE of a prefill engine, for policies that read expert "
        "signatures.", multiple=True, metavar="DIR")  # fmt: skip
@option("--kv-events", None, "Where an engine that computes prompts publishes what its KV cache "
        "holds, for policies that read caches; in the order of the engines.", multiple=True,
        metavar="ENDPOINT")  # fmt: skip
@option("--host", None, "Address to listen on.", default="127.0.0.1", metavar="ADDRESS")
@option("--port", IntRange(0, 65535), "Port to listen on; 0 takes a free one.", default=8080,
        metavar="N")  # fmt: skip
@option("--retries", IntRange(0), "Other engines that a request may go to before its first token.",
        default=1, metavar="N")  # fmt: skip
@_timed("request-timeout", 30.0, "Until a client has sent its request.")
@_timed("connect-timeout", 5.0, "Until an engine accepts a connection.")
@_timed("first-token-timeout", 120.0, "Until the first token of a stream.")
@_timed("token-timeout", 60.0, "Between tokens.")
@_timed("answer-timeout", 1800.0, "Until an answer that is not streamed.")
@_timed("health-interval", 1.0, "Between two questions for an engine's /health.")
@_timed("health-timeout", 3.0, "Until an answer to them; the second without ejects the engine.")
@option("--signal-interval-ms", _SECONDS, "Between two looks at the engines' metrics, where the "
        "policy reads them.", default=100.0, metavar="MS")  # fmt: skip
@_http_options
@option("--max-answer-mib", _MIB, "Largest answer of an engine that is not streamed.",
        default=64.0, metavar="MIB")  # fmt: skip
@option("--log", click.Path(dir_okay=False), "Append a line a request.", metavar="FILE")
def router(decode_urls: tuple[str, ...], prefill_urls: tuple[str, ...], **options: Any) -> None:
    """Route OpenAI's completions to real engines by a policy (docs/router.md).

    Serves /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics until it is told
    to stop. Needs `pip install 'eldr-sim[live]'`."""
    from eldr_sim.serving.router.config import make_config
    from eldr_sim.serving.router.proxy import serve

    fields = {
        f"{name}_s" if name.endswith(("timeout", "health_interval")) else name: value
        for name, value in options.items()
    }
    fields |= {name: list(options[name]) for name in ("capture", "kv_events", "allowed_host")}
    config = make_config(decode_urls=list(decode_urls), prefill_urls=list(prefill_urls), **fields)
    serve(config, announce=lambda line: click.echo(line, err=True))
