"""Command line of the recipe: ``python -m studies.reference_model``."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress

from eldr_sim import __version__
from eldr_sim.command import run_command
from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from studies.reference_model.data import Documents
    from studies.reference_model.model import Qwen3Moe

# Experts see another number of tokens at every step. oneDNN compiles a kernel for each number and
# keeps 1,024 by default; with fewer than it needs, training takes twice the time.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
_TEXT = click.Path(path_type=Path)
_domains = click.option(
    "--domains", help="Comma-separated names of text files to read, in order. [default: all]"
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def cli() -> None:
    """Train the reference model from text and record its routing."""


@cli.command()
@click.argument("text", type=_TEXT)
@click.option("--out", type=_TEXT, required=True, help="Checkpoint folder to make.")
@click.option(
    "--preset", type=click.Choice(["cpu", "gpu"]), default="cpu", help="Size of the model."
)
@click.option("--minutes", type=float, help="Time to train.")
@click.option("--steps", type=int, help="Batches to train instead: reproducible.")
@click.option("--held-out", type=float, default=0.3, help="Share of documents not trained on.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: the preset's]")
@click.option("--threads", type=int, default=1, help="CPU threads.")
@click.option("--seed", type=int, default=0)
@click.option("--resume", is_flag=True, help="Continue an interrupted training.")
@_domains
def train(
    text: Path,
    out: Path,
    preset: str,
    held_out: float,
    device: str | None,
    threads: int,
    resume: bool,
    domains: str | None,
    **schedule: Any,
) -> None:
    """Train a model on the files <domain>.txt of folder TEXT.

    Documents are separated by lines <|endoftext|>. The checkpoint loads in transformers and
    vLLM. The preset gpu has not been run on a GPU yet."""
    import torch

    from studies.reference_model import data
    from studies.reference_model.train import PRESETS
    from studies.reference_model.train import train as run

    torch.set_num_threads(threads)
    model, config = PRESETS[preset]
    config = replace(config, device=device or config.device, **schedule)
    names = domains.split(",") if domains else None
    documents = data.split_documents(data.read_documents(text, names), held_out, config.seed)
    try:
        run(
            documents,
            out,
            model,
            config,
            resume=resume,
            log=lambda entry: click.echo(json.dumps(entry)),
        )
    except KeyboardInterrupt:
        click.echo(f"Interrupted: --resume continues from what {out} holds.", err=True)
        sys.exit(130)
    click.echo(f"Wrote {out}: checkpoint, tokenizer, training state and log")


@cli.command()
@click.argument("checkpoint", type=_TEXT)
@click.argument("text", type=_TEXT)
@click.option("--out", type=_TEXT, required=True, help="Trace folder to make.")
@click.option("--npz", type=_TEXT, help="Also write all that was recorded as a NumPy archive.")
@click.option("--source-data", required=True, help="What TEXT is, with its licences.")
@click.option("--calibration", type=int, default=1050, help="Calibration requests.")
@click.option("--serving", type=int, default=1250, help="Serving requests.")
@click.option("--prompt-lengths", default="64,80,96", help="Tokens, taken in turn.")
@click.option("--output-len", type=int, default=192, help="Tokens to generate per request.")
@click.option("--temperature", type=float, default=0.8, help="Of the sampling.")
@click.option("--gate-scores", type=int, default=256, help="Requests per split with gate scores.")
@click.option("--seed", type=int, default=0)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--processes", type=int, default=1)
@click.option("--notes", default="", help="What else a reader must know.")
@click.option("--force", is_flag=True, help="Replace the trace folder.")
def record(
    checkpoint: Path,
    text: Path,
    out: Path,
    npz: Path | None,
    prompt_lengths: str,
    gate_scores: int,
    processes: int,
    force: bool,
    **options: Any,
) -> None:
    """Record the routing of CHECKPOINT on prompts from the held-out part of TEXT."""
    import torch

    from studies.reference_model import record as recorder
    from studies.reference_model.export import load_checkpoint, read_description

    torch.set_num_threads(1)
    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new folder, or --force")
    if gate_scores < 0:
        raise InputError("gate_scores", f"got {gate_scores}", "0 or more")
    try:
        lengths = tuple(int(length) for length in prompt_lengths.split(","))
    except ValueError:
        raise InputError(
            "prompt_lengths", f"got {prompt_lengths!r}", "numbers with commas"
        ) from None
    said = {name: options.pop(name) for name in ("source_data", "notes")}
    config = recorder.RecordConfig(prompt_lengths=lengths, **options)
    described = read_description(checkpoint)
    documents = _documents_of(checkpoint, text, described["documents"])
    model, tokenizer = load_checkpoint(checkpoint)
    prompts = recorder.choose_prompts(documents, tokenizer, config)
    terminal = sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not terminal) as bar:
        task = bar.add_task("Recording", total=1.0)
        routing = recorder.record(
            checkpoint,
            prompts,
            config,
            processes=processes,
            progress=lambda share: bar.update(task, completed=share),
        )
    trace = recorder.write_routing_trace(
        routing,
        out,
        domains=documents.domains,
        gate_scores=gate_scores,
        model=_description(model, described["figures"]["tokens"]),
        captured_by=(
            f"forward passes of the model in PyTorch ({config.device}): prefill of a held-out "
            f"prompt, then {config.output_len} tokens sampled at temperature "
            f"{config.temperature:g}, seed {config.seed}; expert ids in rank order"
        ),
        tool_versions={
            "eldr-sim": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        force=force,
        **said,
    )
    click.echo(
        f"Wrote {out}: {trace.n_requests} requests, {trace.manifest.n_tokens} tokens, "
        f"{trace.n_layers} layers; at most {prompts.per_document} prompts from one document"
    )
    if npz is not None:
        recorder.write_npz(routing, npz, documents.domains)
        click.echo(f"Wrote {npz}: ids, tokens and the gate scores of all requests")


def _documents_of(checkpoint: Path, text: Path, split: dict[str, Any]) -> Documents:
    """Read a folder of text again and split it as the training of a checkpoint did."""
    from studies.reference_model import data

    read = data.read_documents(text, split["domains"])
    documents = data.split_documents(read, split["held_out"], split["seed"])
    if documents.description() != split:
        raise InputError("text", f"{text} is not the text that {checkpoint} was trained on")
    return documents


def _description(model: Qwen3Moe, tokens: int) -> str:
    """Return name, dimensions and training of a model, for a trace's manifest."""
    c = model.config
    return (
        f"reference-moe-{sum(p.numel() for p in model.parameters()) / 1e6:.0f}m (Qwen3-MoE "
        f"architecture: {c.n_layers} layers, d {c.hidden_size}, {c.n_experts} experts, "
        f"top-{c.top_k}, expert inner {c.expert_size}; trained on {tokens / 1e6:.2f}M tokens)"
    )


def main() -> None:
    """Run the command line; a missing package is one line, too."""
    try:
        run_command(cli)
    except ModuleNotFoundError as error:
        hint = InputError(
            "reference model", f"needs {error.name}", "pip install '.[reference-model]'"
        )
        click.echo(f"Error: {hint}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
