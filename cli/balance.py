"""``eldr-sim balance``: what an engine's counters of experts say."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from eldr_sim.cli.console import print_table
from eldr_sim.cli.decorators import complete, gpus, models, option

if TYPE_CHECKING:
    from eldr_sim.planning.balance import Balance

_READ = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command()
@click.argument("counters", nargs=-1, required=True, type=_READ, metavar="COUNTERS...")
@option("--model", None, "Model that was served.", default="Qwen3-30B-A3B", metavar="MODEL",
        shell_complete=complete(models))  # fmt: skip
@option("--gpu", None, "GPU of each rank.", default="H100", metavar="GPU",
        shell_complete=complete(gpus))  # fmt: skip
@option("--ranks", click.IntRange(2, 1024), "GPUs that share the experts.", default=8)
@option("--tokens", click.IntRange(1, 65536), "Tokens of a step over all GPUs.",
        show_default="32 a GPU; 2048 of prompts")  # fmt: skip
@option("--context", click.IntRange(1, 1 << 20), "Mean context of a sequence, tokens.",
        default=1024)  # fmt: skip
@option("--redundant", click.IntRange(0), "Redundant experts to try; may be repeated.",
        multiple=True, show_default="1, 2 and 4 a GPU")  # fmt: skip
@option("--prompts", bool, "Steps compute prompts; else they decode.")
def balance(
    counters: tuple[Path, ...],
    model: str,
    gpu: str,
    ranks: int,
    tokens: int | None,
    context: int,
    redundant: tuple[int, ...],
    prompts: bool,
) -> None:
    """Say whether EPLB would pay.

    The input is an engine's counters of experts.

    Says whether the load of the GPUs is skewed, whether the skew lasts, and what EPLB, redundant
    experts and METRO's choice of copies would change in the time of a step. COUNTERS are
    dumps of SGLang's expert distribution recorder, Prometheus counters by layer and expert or
    rank, a CSV with columns layer, expert and count, or a log of vLLM's EPLB; several files are
    successive windows of time."""
    from eldr_sim.kernel_profiles.gpus import load_gpu
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.kernel_profiles.parallel import Parallelism
    from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
    from eldr_sim.planning.balance import examine
    from eldr_sim.traces.routing.imports.counters import read_counters

    read = read_counters(counters)
    tokens = tokens or (2048 if prompts else 32) * ranks
    each = -(-tokens // ranks)
    step_time = build_step_time_model(
        load_model(model), load_gpu(gpu), max_num_seqs=1 if prompts else each,
        max_model_len=max(2 * context, each), max_num_batched_tokens=each,
        parallelism=Parallelism(1, True, ranks),
    )  # fmt: skip
    examination = examine(
        read, step_time, ranks, tokens, context, redundant or None, prompts=prompts
    )
    click.echo(f"{read.source}: {examination.windows} windows of time")
    _print_skew(examination)
    if not examination.options:
        click.echo(
            "What EPLB would change needs counts by expert, which these counters do not have"
        )
        return
    kind = "Prompt" if prompts else "Decode"
    now = examination.options[0].step_ms
    rows = [
        [each.name, str(each.redundant), f"{each.busiest:.2f}", f"{each.busiest_experts:.1f}",
         f"{each.moe_ms:.2f}", f"{each.step_ms:.2f}", f"{100 * (each.step_ms / now - 1):+.1f}%"]
        for each in examination.options
    ]  # fmt: skip
    columns = ["placement", "redundant", "busiest GPU's load / mean", "its experts", "MoE ms",
               "step ms", "change"]  # fmt: skip
    print_table(f"{kind} steps of {tokens} tokens on {ranks} {gpu}", columns, rows)
    best = min(examination.options, key=lambda each: each.step_ms)
    gain = 100 * (1 - best.step_ms / now)
    if gain < 1:
        click.echo("No placement shortens a step by 1% or more: leave EPLB off")
    else:
        click.echo(f"Best: {best.name}, {best.redundant} redundant experts: {gain:.1f}% shorter")
    click.echo(
        "Steps are drawn from the loads, without dispatch and combine; placements are made for "
        + ("the first half of the windows, judged on the second" if examination.windows > 1
           else "the same counts that judge them: give several windows to see what lasts")
        + f"; kernels: {step_time.label}"
    )  # fmt: skip


def _print_skew(found: "Balance") -> None:
    skew, layers = found.skew, len(found.skew)
    click.echo(
        f"Skewed: the busiest GPU has {skew.mean():.2f} times the mean load"
        + (f" (worst of {layers} layers {skew.max():.2f})" if layers > 1 else "")
    )
    if found.windows < 2:
        click.echo("Lasting: not known from one window; give several")
        return
    said = "the skew is {:.2f} in the first half of the windows, {:.2f} in the second"
    said = said.format(*found.halves)
    if found.kept is not None:
        said += f"; a placement keeps {100 * found.kept:.0f}% of its gain in the next window"
    if found.correlation is not None:
        said += f"; correlation of loads {found.correlation:.2f}"
    click.echo(f"Lasting: {said}")
