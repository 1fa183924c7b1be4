"""``eldr-sim trace capture``: record routing traces from real engines."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.console import print_written, progress_bar
from eldr_sim.cli.decorators import TENSOR_PARALLEL_SIZE, option, together, writes
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


def _trace_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the written trace's options, checked before a capture of hours, as ``about``."""
    names = ("out", "calibration_fraction", "model_name", "source_data", "notes", "force")

    @functools.wraps(function)
    def command(**options: Any) -> Any:
        about = {name: options.pop(name) for name in names}
        check_options(about["out"], about["force"], about["calibration_fraction"])
        return function(about=about, **options)

    share = (
        "Share of each domain's requests that calibrate policies, 0 to 1, if the log has no split."
    )
    key = "Key of the domain label in a line of the JSONL file."
    decorated: Callable[..., Any] = together(
        writes("--out", Path, "Folder of the routing trace to write.", required=True),
        option("--domain-field", None, key, default="domain", metavar="KEY"),
        option("--calibration-fraction", float, share, default=0.5),
        option("--model-name", None, "Name of the model in the trace. Default: the name of MODEL."),
        option(
            "--source-data",
            None,
            "Source of the prompts, for readers of results. Default: the file's name.",
        ),
        option(
            "--notes",
            None,
            "Notes on the recording, shown with every result.",
            default="",
            show_default=False,
        ),
        option("--force", bool, "Replace the trace in --out."),
    )(command)
    return decorated


_JSONL = "Prompts, a JSON object per line: prompt (text, token ids or chat messages), domain."
#: Prompts and sampling.
_generation_options = together(
    click.argument("model"),
    option("--prompts prompts_file", Path, _JSONL, required=True, metavar="FILE"),
    option("--max-new-tokens", int, "Maximum number of generated tokens per request.", default=128),
    option(
        "--max-prompt-tokens",
        int,
        "Maximum number of prompt tokens; longer prompts are cut. Default: no limit.",
    ),
    option("--temperature", float, "Sampling temperature; 0 is greedy decoding.", default=1.0),
    option("--seed", int, "Seed of sampling.", default=0),
    option("--ignore-eos", bool, "Generate --max-new-tokens tokens, past end-of-sequence tokens."),
    option(
        "--dtype",
        ["auto", "float32", "bfloat16", "float16"],
        "Data type of the weights; auto: the checkpoint's.",
        default="auto",
    ),
)


@capture.command()
@_generation_options
@option("--batch-size", int, "Number of prompts generated together.", default=8)
@option("--device", ["cpu", "cuda"], "Device that runs the model.", default="cpu")
@option("--gate-scores", bool, "Record the gate's scores, too, summed over each prompt (ELDR "
        "4.2.3).")  # fmt: skip
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
@option(TENSOR_PARALLEL_SIZE, int, "GPUs that share the model.", default=1)
@option("--max-model-len", int, "Maximum length of a sequence, tokens. Default: the model's.")
@option("--method", ["plugin", "engine"], "Plug-in on the routers, eager mode; or "
        "enable_return_routed_experts (needs a GPU).", default="plugin")  # fmt: skip
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
    instead and use `collect` afterwards."""
    prompts = read_prompts(prompts_file, domain_field=domain_field)
    token_ids = tokenize(model, prompts, max_prompt_tokens=max_prompt_tokens)
    with progress_bar("Capturing") as update:
        captured = capture_vllm(model, token_ids, progress=update, **generation)
    _write(captured, prompts, model, prompts_file, **about)


@capture.command("collect")
@click.argument("log", type=click.Path(path_type=Path), metavar="DIR")
@option("--requests requests_file", Path, "JSONL: domain, and request_id (as sent in X-Request-Id) "
        "or prompt (token ids).", required=True, metavar="FILE")  # fmt: skip
@_trace_options
def collect_(log: Path, requests_file: Path, domain_field: str, about: dict[str, Any]) -> None:
    """Make a trace from the logs of `vllm serve` in DIR, its ELDR_SIM_CAPTURE folder."""
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
        what = f"requests of the log that {requests_file.name} does not name"
        click.echo(f"Left out: {collected.unlabelled} {what}", err=True)


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
    options["model"] = model_name or Path(model).name
    options["source_data"] = source_data or describe_prompts(prompts_file)
    print_written(out, write_captured(out, captured, prompts, **options))
