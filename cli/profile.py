"""``eldr-sim profile``: measure the kernels of a GPU, or of this machine's CPU."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.decorators import complete, option, parallel_options, plot_option, writes
from eldr_sim.cli.decorators import models as model_names
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.profile.session import Profile


def _seconds(_context: click.Context, _option: click.Parameter, text: str) -> float:
    """Read a time such as 90s, 5m or 1.5h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError("budget", repr(text), "a time such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@click.command(short_help="Measure the kernels of a GPU, or of the CPU.")
@option("--model models", None, "Models to measure the kernels of, comma-separated.",
        default="Qwen3-30B-A3B", metavar="NAME|PATH,...",
        shell_complete=complete(model_names, "file", listed=True))  # fmt: skip
@option("--device", None, "Device to measure: cuda (also AMD GPUs) or cpu.", default="cuda",
        metavar="cuda|cpu")  # fmt: skip
@option("--budget", None, "Time for the measurement: 90s, 5m, 1h. Tables are written from what "
        "was measured by then.", callback=_seconds, default="5m", metavar="TIME")  # fmt: skip
@writes("--out", Path, "Folder of the tables to write.", required=True)
@option("--resume", bool, "Continue the profile in --out.")
@plot_option
@option("--only", None, "Parts to measure: moe, moe-vllm, attention, gemm, elementwise, "
        "collectives, nixl, host-gap. Default: all.", metavar="PART,...")  # fmt: skip
@parallel_options("kernels")
@option("--threads", int, "Threads of a kernel on the CPU.", default=1, metavar="N")
@option("--frontend", Path, "Measure this machine's API server instead of kernels: the "
        "tokeniser in this file, and HTTP requests.", metavar="TOKENIZER.json")  # fmt: skip
@option("--text", Path, "Text to cut the prompts of --frontend from. Default: consecutive token "
        "ids, decoded.", metavar="FILE")  # fmt: skip
def profile(
    models: str,
    out: Path,
    plot: bool,
    only: str | None,
    frontend: Path | None,
    text: Path | None,
    **options: Any,
) -> None:
    """Measure kernels and write latency tables for `eldr-sim run --tables DIR`.

    Coarse over all kernels first, then finer, until the budget ends; --resume goes on. Needs
    `pip install eldr-sim[profile]`; KV transfers also `pip install nixl`. With --frontend only
    `pip install eldr-sim[frontend]`, for `eldr-sim run --frontend`."""
    if frontend is not None:
        _front_end(frontend, text, out)
        return
    if text is not None:
        raise InputError("text", "applies only to the front end", "together with --frontend")
    from eldr_sim.kernel_profiles.profile import session
    from eldr_sim.kernel_profiles.profile.device import open_device
    from eldr_sim.kernel_profiles.profile.measurement_plan import PARTS, Target
    from eldr_sim.kernel_profiles.profile.plots import plot_profile

    start = time.monotonic()
    parallelism = Parallelism(options["tensor_parallel_size"], options["enable_expert_parallel"])
    targets = [Target(load_model(name.strip()), parallelism) for name in models.split(",")]
    for target in targets:
        parallelism.check(target.model)
    parts = PARTS if only is None else tuple(part.strip() for part in only.split(","))
    opened = open_device(options["device"], options["threads"])
    with progress_bar(f"Profiling {opened.facts['device']}") as update:
        measured_profile = session.profile(
            targets,
            opened,
            out,
            budget_s=options["budget"],
            parts=parts,
            resume=options["resume"],
            progress=lambda share, _task: update(share),
        )
    pictures = plot_profile(out, measured_profile.tables, measured_profile.summary) if plot else []
    _report(measured_profile, time.monotonic() - start)
    gpu = out / "gpu.json" if (out / "gpu.json").exists() else opened.name
    click.echo(f"Wrote {len(measured_profile.tables)} tables and {len(pictures)} pictures to {out}")
    click.echo(f"Use them: eldr-sim run --gpu {gpu} --tables {out} --model {models.split(',')[0]}")


def _front_end(tokenizer: Path, text: Path | None, out: Path) -> None:
    from eldr_sim.kernel_profiles.kernels.front_end import PARTS, FrontEndLatency
    from eldr_sim.kernel_profiles.profile.front_end import measure_front_end
    from eldr_sim.kernel_profiles.tables.format import table_name

    with progress_bar("Profiling the front end") as update:
        table = measure_front_end(tokenizer, text=text, progress=update)
    latency = FrontEndLatency.from_table(table)
    sizes = (1000, 8000)
    rows = [[part, *(f"{1e3 * latency.time_s(part, n):.2f}" for n in sizes)] for part in PARTS]
    print_table(f"{table.metadata.device}, ms", ["part", *(f"{n} tokens" for n in sizes)], rows)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("out", f"cannot make {out}: {error.strerror}") from None
    path = out / table_name(table.metadata)
    table.save(path)
    click.echo(f"Wrote {path}")
    click.echo(f"Use it: eldr-sim run --frontend '{path}'")


def _report(found: Profile, took: float) -> None:
    summary = found.summary
    click.echo(
        f"{summary['facts']['device']}: {took:.0f} s; copy {summary['copy_bandwidth'] / 1e9:.1f} "
        f"GB/s, large bf16 GEMM {summary['gemm_flops'] / 1e12:.3f} TFLOP/s"
    )
    rows = [
        [name, f"{entry['done']}", f"{entry['planned']}", summary["skipped"].get(name, "")]
        for name, entry in summary["coverage"].items()
    ]
    print_table("Coverage", ["kernel", "done", "planned", "skipped because"], rows)
    for name, fit in summary["moe_fits"].items():
        linear = fit["linear"]
        held_out = ", ".join(
            f"{form} {fit[form]['held_out_mean']:.1%} (max {fit[form]['held_out_max']:.1%})"
            for form in ("linear", "max_form", "grid")
            if "held_out_mean" in fit[form]
        )
        click.echo(
            f"{name}: {linear['a_us']:.1f} + {linear['b_us']:.3f} d + {linear['c_us']:.3f} tokens "
            f"us up to 128 tokens; held-out error {held_out}"
        )
    for name, entry in summary["moe_bandwidth"].items():
        shares = entry["share_of_copy_bandwidth"]
        click.echo(
            f"{name}: reads at {shares['min']:.0%} to {shares['max']:.0%} of the copy bandwidth at "
            "batch 16 to 64 with half of the experts or more"
            + (f"; {entry['held_back_by']}" if "held_back_by" in entry else "")
        )
    if summary["kv_transfer"]:
        fit = summary["kv_transfer"]
        click.echo(
            f"KV transfer: {fit['setup_us']:.1f} us + {fit['descriptor_us']:.2f} us a descriptor + "
            f"bytes at {fit['bandwidth_gb_s']:.1f} GB/s; error {fit['mean_error']:.0%} "
            f"(max {fit['max_error']:.0%})"
        )
    for name, reason in summary["incomplete_tables"].items():
        click.echo(f"Not written, too few points yet: {name}: {reason}", err=True)
    if summary["points_compared"]:
        large = summary["differences_over_10_percent"]
        rows = [
            [d["kind"], d["point"], f"{d['measured_us']:.1f}", f"{d['other_us']:.1f}",
             f"{d['measured_us'] / d['other_us'] - 1:+.0%}", d["other"], d["likely"] or "not known"]
            for d in large
        ]  # fmt: skip
        columns = ["kernel", "point", "here, us", "there, us", "differs", "there", "likely"]
        title = (
            f"{len(large)} of {summary['points_compared']} points differ from the shipped tables "
            "by over 10%; those state no driver, clocks or power cap"
        )
        print_table(title, columns, rows)
