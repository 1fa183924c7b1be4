"""``eldr-sim router``: a policy in front of real engines."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from eldr_sim.cli.completion import complete, policies

_Command = TypeVar("_Command", bound=Callable[..., object])
_SECONDS = click.FloatRange(0.0, min_open=True)


def _timed(name: str, default: float, text: str) -> Callable[[_Command], _Command]:
    return click.option(f"--{name}", type=_SECONDS, default=default, metavar="S", help=text)


@click.command(short_help="Route requests to real engines by a policy.")
@click.option(
    "--decode",
    "decode_urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="An engine that answers; repeat for more. Without --prefill it computes prompts, too.",
)
@click.option(
    "--prefill",
    "prefill_urls",
    multiple=True,
    metavar="URL",
    help="An engine that computes prompts for them (NIXL); repeat for more.",
)
@click.option(
    "--policy",
    default="jsq",
    metavar="NAME[:P=V,...]",
    shell_complete=complete(policies("decode")),
    help="Chooses the decode engine.",
)
@click.option(
    "--prefill-policy",
    default="least_loaded",
    metavar="NAME[:P=V,...]",
    shell_complete=complete(policies("prefill")),
    help="Chooses the prefill engine.",
)
@click.option(
    "--capture",
    multiple=True,
    metavar="DIR",
    help="ELDR_SIM_CAPTURE of a prefill engine, for policies that read expert signatures.",
)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    metavar="N",
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=1,
    metavar="N",
    help="Other engines that a request may go to before its first token.",
)
@_timed("request-timeout", 30.0, "Until a client has sent its request.")
@_timed("connect-timeout", 5.0, "Until an engine accepts a connection.")
@_timed("first-token-timeout", 120.0, "Until the first token of a stream.")
@_timed("token-timeout", 60.0, "Between tokens.")
@_timed("answer-timeout", 1800.0, "Until an answer that is not streamed.")
@_timed("health-interval", 1.0, "Between two questions for an engine's /health.")
@_timed("health-timeout", 3.0, "Until an answer to them; the second without ejects the engine.")
@click.option(
    "--signal-interval-ms",
    type=_SECONDS,
    default=100.0,
    metavar="MS",
    help="Between two looks at the engines' metrics, where the policy reads them.",
)
@click.option(
    "--log", type=click.Path(dir_okay=False), metavar="FILE", help="Write a line a request."
)
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
    fields["capture"] = list(options["capture"])
    config = make_config(decode_urls=list(decode_urls), prefill_urls=list(prefill_urls), **fields)
    serve(config, announce=lambda line: click.echo(line, err=True))
