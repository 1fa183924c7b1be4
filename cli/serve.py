"""``eldr-sim serve``, a simulated cluster behind OpenAI's API; ``router``, before real engines."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click import FloatRange, IntRange

from eldr_sim.cli.decorators import complete, option, output, policies, together
from eldr_sim.cli.run_options import GroupedCommand, check_out, config_from_options, run_options
from eldr_sim.errors import InputError

_FILE = click.Path(dir_okay=False, path_type=Path)
_MIB = FloatRange(0.0, min_open=True)


def _http_options(command: Any) -> Any:
    """Add the options that both servers have."""
    return together(
        option("--allowed-host", None, "A name that requests may use for this server, besides IP "
               "addresses, localhost and the machine's name: gpu7, .example.com, * for any; "
               "repeat for more.", multiple=True, metavar="NAME"),
        option("--max-concurrent-requests", IntRange(1), "Maximum number of requests in progress; "
            "others get 429.", default=4096, metavar="N"),
        option("--max-body-mib", _MIB, "Maximum size of a request body, MiB.", default=64.0,
            metavar="MIB"),
        option("--max-buffered-mib", _MIB, "Maximum memory of bodies and unstreamed answers, MiB; "
            "other requests get 503.", default=1024.0, metavar="MIB"),
        option("--grace-period grace_period_s", FloatRange(0.0), "Time for requests in progress "
            "to end after SIGTERM, s.", default=180.0, metavar="S"),
    )(command)  # fmt: skip


_OF_SERVICE = ("speed", "max_queue", "ready_after_s", "tokenizer", "log")


@click.command(cls=GroupedCommand, short_help="Serve OpenAI's API from a simulated cluster.")
@option("--host", None, "Address to listen on; 0.0.0.0 for all.", default="127.0.0.1",
        metavar="ADDRESS")  # fmt: skip
@option("--port", IntRange(0, 65535), "Port of the cluster's API; 0: any free port.",
        default=8000, metavar="N")  # fmt: skip
@option("--engine-ports", IntRange(1, 65535), "First port of the workers, one port per worker, "
    "prefill workers first, for an external router; xC and xPyD clusters.",
        metavar="N")  # fmt: skip
@option("--engine-header", None, "Request header with the number of the worker, from 0, for an "
    "external router at one port; xC and xPyD clusters.", metavar="NAME")  # fmt: skip
@option("--admin-port", IntRange(1, 65535), "Port on the loopback address for faults: slow, hang, "
        "kill and drain workers (docs/serve.md).", metavar="N")  # fmt: skip
@option("--kv-events-config", None, "Publish KV events as vLLM's option of this name does; worker "
    "n publishes at the port plus n.", metavar="JSON")  # fmt: skip
@option("--lora-modules adapters", None, "Name of a LoRA adapter to serve, at the cost of the "
        "model; repeat for more.", multiple=True, metavar="NAME[=PATH]")  # fmt: skip
@option("--speed", FloatRange(0.0, min_open=True), "Simulated seconds per second of wall-clock "
        "time.", default=1.0, metavar="X")  # fmt: skip
@option("--max-queue", IntRange(1), "Maximum number of waiting requests; others get 429.  "
        "[default: no limit]", metavar="N")  # fmt: skip
@option("--ready-after ready_after_s", FloatRange(0.0), "Time until /health answers 200, s, as "
        "while an engine loads weights.", default=0.0, metavar="S")  # fmt: skip
@option("--tokenizer", _FILE, "A tokenizer.json to count prompt tokens with.  [default: "
        "four characters per token]", metavar="FILE")  # fmt: skip
@_http_options
@option("--log", _FILE, "Append a line of JSON for each request, for --replay.", metavar="FILE")
@option("--replay", _FILE, "Simulate the requests of a --log again, without a server.",
        metavar="LOG")  # fmt: skip
@output("Folder for the result of --replay.", "the result in --out")
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
    from eldr_sim.serving.simulated.handover import Worker, workers_of
    from eldr_sim.serving.simulated.kv_events import parse_kv_events
    from eldr_sim.serving.simulated.server import Service
    from eldr_sim.serving.simulated.server import serve as serve_all

    service = {name: options.pop(name) for name in _OF_SERVICE}
    guard = service["guard"] = Guard(host, allowed_host)
    intake = Intake(Limits(*(options.pop(name) for name in Limits._fields)))
    service["adapters"] = [name.partition("=")[0] for name in adapters]
    service["kv_events"] = None if kv_events_config is None else parse_kv_events(kv_events_config)
    config = config_from_options(options)
    if options.get("frontend") is None:
        config = config.replace(frontend="none")  # this server is a real one
    if options.get("warmup") is None:
        config = config.replace(warmup=0)
    workers, ports = [Worker(config, None)], [port]
    if engine_ports is not None or engine_header is not None:
        if engine_ports is not None and engine_header is not None:
            raise InputError("engine_header", "given together with --engine-ports", "one of them")
        if service["log"] is not None:
            field = "engine_ports" if engine_header is None else "engine_header"
            raise InputError(field, "given together with --log", "one of them")
        workers = workers_of(config)
        if engine_ports is not None:
            ports = [engine_ports + worker for worker in range(len(workers))]
    what = "compiling, and drawing the model's routing where it is new"
    click.echo(f"Getting ready: {what}", err=True)
    services = [
        Service(worker.config, intake=intake, rank=rank, role=worker.role, **service)
        for rank, worker in enumerate(workers)
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
@option("--decode decode_urls", None, "URL of an engine that decodes; repeat for more. Without "
        "--prefill it also computes prompts.", multiple=True, required=True,
        metavar="URL")  # fmt: skip
@option("--prefill prefill_urls", None, "URL of an engine that computes prompts and hands KV "
        "caches over (NIXL); repeat for more.", multiple=True, metavar="URL")  # fmt: skip
@option("--policy", None, "Policy that chooses the decode engine (docs/router.md).", default="jsq",
        metavar="NAME[:P=V,...]", shell_complete=complete(policies("decode")))  # fmt: skip
@option("--prefill-policy", None, "Policy that chooses the prefill engine.", default="least_loaded",
        metavar="NAME[:P=V,...]", shell_complete=complete(policies("prefill")))  # fmt: skip
@option("--capture", None, "Folder of ELDR_SIM_CAPTURE of a prefill engine, for policies that "
        "read expert signatures; repeat for more.", multiple=True, metavar="DIR")  # fmt: skip
@option("--kv-events", None, "Endpoint of the KV events of an engine that computes prompts, for "
        "policies that read caches; repeat in the order of the engines.", multiple=True,
        metavar="ENDPOINT")  # fmt: skip
@option("--host", None, "Address to listen on.", default="127.0.0.1", metavar="ADDRESS")
@option("--port", IntRange(0, 65535), "Port to listen on; 0 takes a free one.", default=8080,
        metavar="N")  # fmt: skip
@option("--retries", IntRange(0), "Maximum number of other engines to try before the first token.",
        default=1, metavar="N")  # fmt: skip
@_timed("request-timeout", 30.0, "Maximum time for a client to send its request, s.")
@_timed("connect-timeout", 5.0, "Maximum time for an engine to accept a connection, s.")
@_timed("first-token-timeout", 120.0, "Maximum time to the first token of a stream, s.")
@_timed("token-timeout", 60.0, "Maximum time between two tokens of a stream, s.")
@_timed("answer-timeout", 1800.0, "Maximum time for an answer that is not streamed, s.")
@_timed("health-interval", 1.0, "Time between two checks of an engine's /health, s.")
@_timed("health-timeout", 3.0, "Maximum time for an answer of /health, s; an engine is ejected "
        "after two without.")  # fmt: skip
@option("--signal-interval-ms", _SECONDS, "Time between two reads of the engines' /metrics, ms, "
        "for policies that use them.", default=100.0, metavar="MS")  # fmt: skip
@_http_options
@option("--max-answer-mib", _MIB, "Maximum size of an answer that is not streamed, MiB.",
        default=64.0, metavar="MIB")  # fmt: skip
@option("--log", click.Path(dir_okay=False), "Append a line of JSON for each request, without "
        "content.", metavar="FILE")  # fmt: skip
def router(decode_urls: tuple[str, ...], prefill_urls: tuple[str, ...], **options: Any) -> None:
    """Route OpenAI's completions to real engines by a policy (docs/router.md).

    Serves /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics until SIGTERM or
    Ctrl-C. Needs `pip install 'eldr-sim[live]'`."""
    from eldr_sim.serving.router.config import make_config
    from eldr_sim.serving.router.proxy import serve

    fields = {
        f"{name}_s" if name.endswith(("timeout", "health_interval")) else name: value
        for name, value in options.items()
    }
    fields |= {name: list(options[name]) for name in ("capture", "kv_events", "allowed_host")}
    config = make_config(decode_urls=list(decode_urls), prefill_urls=list(prefill_urls), **fields)
    serve(config, announce=lambda line: click.echo(line, err=True))
