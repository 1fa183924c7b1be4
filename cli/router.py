"""``eldr-sim router``: a policy in front of real engines."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click import IntRange

from eldr_sim.cli.completion import complete, policies
from eldr_sim.cli.option import option

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
@option("--log", click.Path(dir_okay=False), "Write a line a request.", metavar="FILE")
def router(decode_urls: tuple[str, ...], prefill_urls: tuple[str, ...], **options: Any) -> None:
    """Route OpenAI's completions to real engines by a policy (docs/router.md).

    Serves /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics until it is told
    to stop. Needs `pip install 'eldr-sim[live]'`.
    """
    from eldr_sim.serving.router.config import make_config
    from eldr_sim.serving.router.proxy import serve

    fields = {
        f"{name}_s" if name.endswith(("timeout", "health_interval")) else name: value
        for name, value in options.items()
    }
    fields |= {name: list(options[name]) for name in ("capture", "kv_events")}
    config = make_config(decode_urls=list(decode_urls), prefill_urls=list(prefill_urls), **fields)
    serve(config, announce=lambda line: click.echo(line, err=True))
