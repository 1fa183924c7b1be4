"""``eldr-sim trace capture``: record routing traces from real engines."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.console import progress_bar
from eldr_sim.cli.spellings import TENSOR_PARALLEL_SIZE
from eldr_sim.traces.routing.capture.captured import (
    CapturedRouting,
    check_options,
    describe_prompts,
    write_captured,
)
from eldr_sim.traces.routing.capture.collect import collect
from eldr_sim.traces.routing.capture.hf import capture_transformers, load_model
from eldr_sim.traces.routing.capture.prompts import Prompt, read_prompts, tokenize
from eldr_sim.traces.routing.capture.vllm_engine import capture_vllm


@click.group(short_help="Record a routing trace from a real engine.")
def capture() -> None:
    """Record which experts a model chooses, token by token, while an engine runs it."""


def _options(function: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        function = option(function)
    return function


def _trace_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the trace that is written; the command gets them as ``about``.

    They are checked before the capture, which may take hours.
    """
    names = ("out", "calibration_fraction", "model_name", "source_data", "notes", "force")

    @functools.wraps(function)
    def command(**options: Any) -> Any:
        about = {name: options.pop(name) for name in names}
        check_options(about["out"], about["force"], about["calibration_fraction"])
        return function(about=about, **options)

    return _options(
        command,
        click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR"),
        click.option(
            "--domain-field",
            default="domain",
            metavar="KEY",
            help="Key of the domain label in the JSONL file.",
        ),
        click.option(
            "--calibration-fraction",
            type=float,
            default=0.5,
            help="Share of each domain for fitting policies, where a prompt names no split.",
        ),
        click.option("--model-name", help="Name in the trace; that of MODEL by default."),
        click.option(
            "--source-data", help="Where the prompts come from; the file's name by default."
        ),
        click.option(
            "--notes", default="", show_default=False, help="Notes for readers of results."
        ),
        click.option("--force", is_flag=True, help="Replace DIR."),
    )


def _generation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of prompts and sampling."""
    return _options(
        function,
        click.argument("model"),
        click.option(
            "--prompts",
            "prompts_file",
            type=click.Path(path_type=Path),
            required=True,
            metavar="FILE",
            help="JSONL: prompt (text, token ids or chat messages) and domain.",
        ),
        click.option("--max-new-tokens", type=int, default=128),
        click.option("--max-prompt-tokens", type=int, help="Cut longer prompts to this."),
        click.option("--temperature", type=float, default=1.0, help="0 is greedy."),
        click.option("--seed", type=int, default=0),
        click.option("--ignore-eos", is_flag=True, help="Never stop before --max-new-tokens."),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
        ),
    )


@capture.command()
@_generation_options
@click.option("--batch-size", type=int, default=8)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option(
    "--gate-scores", is_flag=True, help="Also sum the gate's scores over each prompt (ELDR 4.2.3)."
)
@_trace_options
def transformers(
    model: str,
    prompts_file: Path,
    max_prompt_tokens: int | None,
    device: str,
    dtype: str,
    domain_field: str,
    about: dict[str, Any],
    **generation: Any,
) -> None:
    """Generate with Hugging Face transformers from MODEL (folder or hub name) and record."""
    prompts = read_prompts(prompts_file, domain_field=domain_field)
    token_ids = tokenize(model, prompts, max_prompt_tokens=max_prompt_tokens)
    loaded = load_model(model, device=device, dtype=dtype)
    with progress_bar("Capturing") as update:
        captured = capture_transformers(loaded, token_ids, progress=update, **generation)
    _write(captured, prompts, model, prompts_file, **about)


@capture.command()
@_generation_options
@click.option(*TENSOR_PARALLEL_SIZE, type=int, default=1)
@click.option("--max-model-len", type=int, help="Longest sequence; the model's own by default.")
@click.option(
    "--method",
    type=click.Choice(["plugin", "engine"]),
    default="plugin",
    help="Plug-in on the routers, eager mode; or enable_return_routed_experts (needs a GPU).",
)
@_trace_options
def vllm(
    model: str,
    prompts_file: Path,
    max_prompt_tokens: int | None,
    domain_field: str,
    about: dict[str, Any],
    **generation: Any,
) -> None:
    """Generate with an offline vLLM from MODEL (folder or hub name) and record.

    Needs vLLM (docs/capture.md). For a server, start `vllm serve` with ELDR_SIM_CAPTURE=DIR
    instead and use `collect` afterwards.
    """
    prompts = read_prompts(prompts_file, domain_field=domain_field)
    token_ids = tokenize(model, prompts, max_prompt_tokens=max_prompt_tokens)
    with progress_bar("Capturing") as update:
        captured = capture_vllm(model, token_ids, progress=update, **generation)
    _write(captured, prompts, model, prompts_file, **about)


@capture.command("collect")
@click.argument("log", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--requests",
    "requests_file",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="JSONL: domain, and request_id (as sent in X-Request-Id) or prompt (token ids).",
)
@_trace_options
def collect_(log: Path, requests_file: Path, domain_field: str, about: dict[str, Any]) -> None:
    """Make a trace of what `vllm serve` logged into DIR, its ELDR_SIM_CAPTURE."""
    requests = read_prompts(requests_file, domain_field=domain_field, need_prompt=False)
    collected = collect(log, requests)
    _write(collected.captured, collected.prompts, collected.model, requests_file, **about)
    for names, what in (
        (collected.absent, "are not in the log"),
        (collected.unfinished, "generated no token that the log holds"),
    ):
        if names:
            click.echo(f"Left out: {len(names)} requests {what}, such as {names[0]}", err=True)
    if collected.unlabelled:
        click.echo(
            f"Left out: {collected.unlabelled} requests of the log that {requests_file.name} does "
            "not name",
            err=True,
        )


def _write(
    captured: CapturedRouting,
    prompts: list[Prompt],
    model: str,
    prompts_file: Path,
    *,
    out: Path,
    model_name: str | None,
    source_data: str | None,
    **options: Any,
) -> None:
    trace = write_captured(
        out,
        captured,
        prompts,
        model=model_name or Path(model).name,
        source_data=source_data or describe_prompts(prompts_file),
        **options,
    )
    click.echo(
        f"Wrote {out}: {trace.n_requests} requests, {trace.manifest.n_tokens} tokens, "
        f"{trace.n_layers} layers, {trace.n_experts} experts, top-{trace.top_k}"
    )
