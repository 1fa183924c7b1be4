"""``eldr-sim trace fit-synthetic`` and ``synthesize``: synthetic routing of any shape."""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.console import print_table, print_written, progress_bar
from eldr_sim.cli.decorators import option, writes
from eldr_sim.cli.run_options import check_file
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.format import REFERENCE_TRACE, RoutingTrace, open_trace
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.routing.synthetic.model_fit import fit_routing_model
from eldr_sim.traces.routing.synthetic.presets import (
    BANDS,
    FITTED,
    PRESETS,
    fitted_model,
    preset_model,
)
from eldr_sim.traces.routing.synthetic.reshape import with_layers
from eldr_sim.traces.routing.synthetic.synthesize import synthesize as write_synthetic
from eldr_sim.traces.routing.synthetic.synthesize import synthesize_like
from eldr_sim.traces.routing.writer import check_target
from eldr_sim.validation.synthetic_twin import TwinStatistic, compare_with_twin, twin_report


@click.command("fit-synthetic", short_help="Fit a generative model of routing to a trace.")
@click.argument("name", default=REFERENCE_TRACE, metavar="[NAME|DIR]")
@writes("--out", Path, "Fitted model to write.", required=True, metavar="FILE.npz")
@writes("--report", Path, "Folder for a report: a synthetic twin of the trace and its statistics "
        "next to the trace's.")  # fmt: skip
@option("--seed", int, "Seed of the draw.", default=0)
@option("--force", bool, "Replace the file and the report.")
def fit_synthetic(name: str, out: Path, report: Path | None, seed: int, force: bool) -> None:
    """Fit a generative model of routing to a trace."""
    check_file(out, force, report, "model")
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
@option("--preset", None, f"Preset to draw from: {', '.join(PRESETS)}.", metavar="NAME")
@option("--from fitted", None, f"A fitted model that comes with the package ({', '.join(FITTED)}), "
        "or one of trace fit-synthetic. Of its shape only --layers may be changed.",
        metavar="NAME|FILE.npz")  # fmt: skip
@writes("--out", Path, "Folder of the routing trace to write.", required=True)
@option("--band", [*BANDS], "How much of the variance between requests the domain explains in the "
        "preset.  [default: middle]")  # fmt: skip
@option("--layers", int, "Number of MoE layers.  [default: the model's]")
@option("--experts", int, "Number of routed experts per layer.  [default: the model's]")
@option("--top-k", int, "Number of experts per token and layer.  [default: the model's]")
@option("--domains", None, "Domains to draw.  [default: those of --like, or of both workloads]",
        metavar="NAME,NAME,...")  # fmt: skip
@option("--set", None, "Strength of a term, e.g. task=2.5; docs/sources.md lists them. "
        "May be repeated.", multiple=True, metavar="NAME=VALUE")  # fmt: skip
@option("--requests", int, "Number of requests to serve.  [default: 800]")
@option("--calibration", int, "Number of requests that calibrate policies.  [default: 640]")
@option("--prompt-len", None, "Prompt tokens of each request.  [default: 64, or as fitted]",
        metavar="N|LOW:HIGH")  # fmt: skip
@option("--output-len", None, "Generated tokens of each request.  [default: 128, or as fitted]",
        metavar="N|LOW:HIGH")  # fmt: skip
@option("--like", None, "Take domains, lengths and splits of the requests from this trace.",
        metavar="NAME|DIR")  # fmt: skip
@option("--seed", int, "Seed of the draw.", default=0)
@option("--force", bool, "Replace the trace in --out.")
def synthesize(
    preset: str | None, fitted: str | None, out: Path, like: str | None, **options: Any
) -> None:
    """Write a synthetic routing trace of any shape, from a preset or a fitted model."""
    if (preset is None) == (fitted is None):
        raise InputError("preset", "give either --preset or --from", ", ".join(PRESETS))
    check_target(out, options["force"])
    if preset is not None and like is not None and options["domains"] is None:
        options["domains"] = ",".join(open_trace(like).domains)
    model = _preset(preset, options) if preset is not None else _fitted(str(fitted), options)
    with progress_bar("drawing experts") as update:
        shared: dict[str, Any] = {"seed": options["seed"], "force": options["force"]}
        shared["progress"] = update
        if like is not None:
            _refuse(options, _OF_REQUESTS, "--like", "one of the two")
            made = synthesize_like(model, open_trace(like), out, **shared)
        else:
            shared["requests"] = 800 if options["requests"] is None else options["requests"]
            held = options["calibration"]
            shared["calibration"] = 640 if held is None else held
            for name in ("prompt_len", "output_len"):
                flag = name.replace("_", "-")
                shared[name] = _span(flag, options[name], model.facts[name])
            made = write_synthetic(model, out, **shared)
    print_written(out, made, ", synthetic")


#: Options of `synthesize` that a fitted model and a trace to be like settle.
_OF_PRESETS = ("band", "experts", "top_k", "domains", "set")
_OF_REQUESTS = ("requests", "calibration", "prompt_len", "output_len")


def _refuse(options: dict[str, Any], names: tuple[str, ...], beside: str, allowed: str) -> None:
    for name in names:
        if options[name] not in (None, ()):
            flag = name.replace("_", "-")
            raise InputError(flag, f"--{flag} beside {beside}", allowed)


def _fitted(name: str, options: dict[str, Any]) -> RoutingModel:
    _refuse(options, _OF_PRESETS, "--from", "--layers only")
    model = fitted_model(name) if name in FITTED else RoutingModel.load(name)
    layers = options["layers"]
    return model if layers is None else with_layers(model, layers, options["seed"])


def _preset(name: str, options: dict[str, Any]) -> RoutingModel:
    domains = options["domains"]
    return preset_model(
        name,
        n_layers=options["layers"],
        n_experts=options["experts"],
        top_k=options["top_k"],
        domains=None if domains is None else [part.strip() for part in domains.split(",")],
        settings=_settings(options["set"]),
        seed=options["seed"],
        band=options["band"] or "middle",
    )


def _compare(opened: RoutingTrace, model: RoutingModel, seed: int) -> list[TwinStatistic]:
    with (
        tempfile.TemporaryDirectory(prefix="eldr-sim-twin-") as folder,
        progress_bar("drawing the twin") as update,
    ):
        other = seed + 1_000_003  # that the fit did not use
        twin = synthesize_like(model, opened, Path(folder) / "twin", seed=other, progress=update)
        return compare_with_twin(opened, twin)


def _print(rows: list[TwinStatistic]) -> None:
    for title, fitted in (("Fitted", True), ("Checked: the model was not fitted to these", False)):
        shown = (row for row in rows if row.fitted == fitted)
        cells = [[row.name, f"{row.real:.3f}", f"{row.synthetic:.3f}"] for row in shown]
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
