"""``eldr-sim trace fit-synthetic`` and ``synthesize``: synthetic routing of any shape."""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.errors import InputError
from eldr_sim.simulator.results import check_output
from eldr_sim.traces.routing.format import REFERENCE_TRACE, RoutingTrace, open_trace
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.routing.synthetic.model_fit import fit_routing_model
from eldr_sim.traces.routing.synthetic.presets import (
    BANDS,
    FITTED,
    PRESETS,
    Band,
    fitted_model,
    preset_model,
)
from eldr_sim.traces.routing.synthetic.reshape import with_layers
from eldr_sim.traces.routing.synthetic.synthesize import synthesize as write_synthetic
from eldr_sim.traces.routing.synthetic.synthesize import synthesize_like
from eldr_sim.validation.synthetic_twin import TwinStatistic, compare_with_twin, twin_report


@click.command("fit-synthetic", short_help="Fit a generative model of routing to a trace.")
@click.argument("name", default=REFERENCE_TRACE, metavar="[NAME|DIR]")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE.npz", help="Model."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Draw a twin of the trace, print what was fitted and what was not, and write both.",
)
@click.option("--seed", type=int, default=0)
@click.option("--force", is_flag=True, help="Replace the file and the report.")
def fit_synthetic(name: str, out: Path, report: Path | None, seed: int, force: bool) -> None:
    """Fit a generative model of routing to a trace."""
    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force")
    if report is not None:
        check_output(report, force)
        if report.resolve() in (out.resolve(), *out.resolve().parents):
            raise InputError("report", f"{report} would hold {out}", "a folder beside the model")
    opened = open_trace(name)
    start = time.perf_counter()
    with progress_bar("fitting") as update:
        model = fit_routing_model(opened, seed=seed, progress=update)
    seconds = time.perf_counter() - start
    with ExitStack() as stack:
        if report is not None:
            rows = _compare(opened, model, seed)
            about = {"trace": opened.manifest.model_dump(), "model": model.facts, "seed": seed}
            stack.enter_context(twin_report(report, rows, about, force=force))
        model.save(out, force=force)
    click.echo(
        f"Fitted {model.n_layers} layers x {model.n_experts} experts, {len(model.domains)} "
        f"domains, in {seconds:.1f} s"
    )
    if report is not None:
        _print(rows)
    click.echo(f"Wrote {out}")
    if report is not None:
        click.echo(f"Wrote {report}: the trace beside its twin")


@click.command(short_help="Write a synthetic trace of any shape.")
@click.option("--preset", metavar="NAME", help=f"Shape and strengths: {', '.join(PRESETS)}.")
@click.option(
    "--from",
    "fitted",
    metavar="NAME|FILE.npz",
    help=f"A fitted model that comes with the package ({', '.join(FITTED)}), or one of trace "
    "fit-synthetic. Of its shape only --layers may be changed.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR")
@click.option("--band", type=click.Choice([*BANDS]), help="Of the preset.  [default: middle]")
@click.option("--layers", type=int, help="MoE layers.")
@click.option("--experts", type=int, help="Routed experts a layer.")
@click.option("--top-k", type=int, help="Experts that a token chooses in a layer.")
@click.option("--domains", metavar="NAME,NAME,...", help="By default those of both workloads.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Strength of a term, e.g. task=2.5; docs/synthetic.md lists them. May be repeated.",
)
@click.option("--requests", type=int, help="Of the serving split.  [default: 800]")
@click.option("--calibration", type=int, help="Of the calibration split.  [default: 640]")
@click.option("--prompt-len", metavar="N|LOW:HIGH", help="Tokens.  [default: 64, or as fitted]")
@click.option("--output-len", metavar="N|LOW:HIGH", help="Tokens.  [default: 128, or as fitted]")
@click.option(
    "--like", metavar="NAME|DIR", help="Requests as in this trace: domains, lengths, splits."
)
@click.option("--seed", type=int, default=0)
@click.option("--force", is_flag=True, help="Replace DIR.")
def synthesize(
    preset: str | None,
    fitted: str | None,
    out: Path,
    band: Band | None,
    layers: int | None,
    experts: int | None,
    top_k: int | None,
    domains: str | None,
    settings: tuple[str, ...],
    requests: int | None,
    calibration: int | None,
    prompt_len: str | None,
    output_len: str | None,
    like: str | None,
    seed: int,
    force: bool,
) -> None:
    """Write a synthetic routing trace of any shape, from a preset or a fitted model."""
    if (preset is None) == (fitted is None):
        raise InputError("preset", "give --preset or --from, one of both", ", ".join(PRESETS))
    if fitted is not None:
        for option, value in (
            ("band", band),
            ("experts", experts),
            ("top-k", top_k),
            ("domains", domains),
            ("set", settings or None),
        ):
            if value is not None:
                raise InputError(option, f"--{option} beside --from", "--layers only")
        model = fitted_model(fitted) if fitted in FITTED else RoutingModel.load(fitted)
        model = model if layers is None else with_layers(model, layers, seed)
    else:
        assert preset is not None
        names = None if domains is None else [name.strip() for name in domains.split(",")]
        model = preset_model(
            preset,
            n_layers=layers,
            n_experts=experts,
            top_k=top_k,
            domains=names,
            settings=_settings(settings),
            seed=seed,
            band=band or "middle",
        )
    with progress_bar("drawing experts") as update:
        shared: dict[str, Any] = {"seed": seed, "force": force, "progress": update}
        if like is not None:
            for option, number in (("requests", requests), ("calibration", calibration)):
                if number is not None:
                    raise InputError(option, f"--{option} beside --like", "one of both")
            for option, text in (("prompt-len", prompt_len), ("output-len", output_len)):
                if text is not None:
                    raise InputError(option, f"--{option} beside --like", "one of both")
            made = synthesize_like(model, open_trace(like), out, **shared)
        else:
            made = write_synthetic(
                model,
                out,
                requests=800 if requests is None else requests,
                calibration=640 if calibration is None else calibration,
                prompt_len=_span("prompt-len", prompt_len, model.facts["prompt_len"]),
                output_len=_span("output-len", output_len, model.facts["output_len"]),
                **shared,
            )
    click.echo(
        f"Wrote {out}: {made.n_requests} requests, {made.manifest.n_tokens} tokens, "
        f"{made.n_layers} layers, {made.n_experts} experts, top-{made.top_k}, synthetic"
    )


def _compare(opened: RoutingTrace, model: RoutingModel, seed: int) -> list[TwinStatistic]:
    with (
        tempfile.TemporaryDirectory(prefix="eldr-sim-twin-") as folder,
        progress_bar("drawing the twin") as update,
    ):
        # A seed that the fit did not use.
        twin = synthesize_like(
            model, opened, Path(folder) / "twin", seed=seed + 1_000_003, progress=update
        )
        return compare_with_twin(opened, twin)


def _print(rows: list[TwinStatistic]) -> None:
    for title, fitted in (("Fitted", True), ("Checked: the model was not fitted to these", False)):
        cells = [
            [row.name, f"{row.real:.3f}", f"{row.synthetic:.3f}"]
            for row in rows
            if row.fitted == fitted
        ]
        print_table(title, ["statistic", "real", "synthetic"], cells)
        click.echo()


def _settings(pairs: tuple[str, ...]) -> dict[str, float]:
    settings = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            settings[name.strip()] = float(value)
        except ValueError:
            raise InputError("set", f"got {pair!r}", "NAME=VALUE with a number") from None
    return settings


def _span(option: str, text: str | None, default: int) -> tuple[int, int]:
    if text is None:
        return default, default
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise InputError(option, f"got {text!r}", "N or LOW:HIGH") from None
