"""``eldr-sim calibrate``: constants that are fitted to a user's own runs."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.decorators import option, writes
from eldr_sim.cli.run_options import GroupedCommand, config_from_options, run_options
from eldr_sim.errors import InputError
from eldr_sim.outputs import whole_file
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import RunConfig

if TYPE_CHECKING:
    from eldr_sim.validation.published.bench import Bench
    from eldr_sim.validation.published.calibration import Fit, HeldOut, NextRun

_READ = click.Path(path_type=Path, dir_okay=False, exists=True)
#: Words of a launch line by which its engine is known.
_ENGINE_OF = {"sglang": "sglang", "trtllm": "trtllm", "tensorrt_llm": "trtllm", "vllm": "vllm"}


#: Options of a load, which a result has itself.
_LOAD = (
    "workload", "request_rate", "num_requests", "duration", "burstiness", "load", "arrivals",
    "max_concurrency", "input_len", "output_len", "random_range_ratio", "columns", "time_unit",
)  # fmt: skip
#: Options that say an engine.
_SAY_ENGINE = ("engine", "engine_args", "extra_llm_api_options", "config_file", "preset")


def results_and_configs(
    results: Sequence[Path], config: RunConfig, options: Mapping[str, Any]
) -> "tuple[list[Bench], list[RunConfig]]":
    """Read results of benchmarks; return them and the configuration of each, with its model and
    engine. Raises InputError where options say a load, or another engine than a result, or its
    model is not known."""
    from eldr_sim.validation.published.bench import read_bench, with_model

    found = [each for path in results for each in read_bench(path)]
    for each in found:
        if clash := [name for name in _LOAD if options.get(name) is not None]:
            raise InputError(clash[0], f"{each.name} says its own load", "a result without it")
    given = config.engine.model != RUN_FIELDS["model"].default or any(
        options.get(name) for name in ("model", "config_file", "preset")
    )
    made = [_of_engine(each, config, options) for each in found]
    return found, [with_model(each, of, given=given) for each, of in zip(found, made, strict=True)]


def _of_engine(each: "Bench", config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration for the engine that a result names, if it names one."""
    engine = each.served_by
    if not engine or engine == config.engine.engine:
        return config
    if any(options.get(name) for name in _SAY_ENGINE):
        problem = f"{config.engine.engine}, but {each.name} is of {engine}"
        raise InputError("engine", problem, f"{engine}, or none: the result says it")
    return config_from_options({**options, "engine": engine})


@click.command(cls=GroupedCommand)
@click.argument("results", nargs=-1, required=True, type=_READ, metavar="BENCH.json...")
@option("--launch", None, "The line that started the engine: \"vllm serve MODEL ...\", SGLang's or "
        "TensorRT-LLM's.", metavar="LINE")  # fmt: skip
@run_options(without=("calibration",))
@writes("--out", click.Path(path_type=Path, dir_okay=False), "Write the calibration here, for "
        "--calibration.", default="calibration.yaml", metavar="FILE.yaml")  # fmt: skip
@option("--force", bool, "Replace the file.")
@option("--next/--no-next wanted", bool, "Search for the load to measure next.", default=True)
def calibrate(
    results: tuple[Path, ...],
    launch: str | None,
    out: Path,
    force: bool,
    wanted: bool,
    **options: Any,
) -> None:
    """Fit constants to runs of your own.

    Prints how well they predict a run left out. Reads results of `vllm bench serve`, SGLang's
    bench_serving, AIPerf, GuideLLM and inference-perf, and forward-pass metrics of an engine (JSON
    lines). Fits factors of decode and prefill kernels, the host time of a step, and a factor of the
    API servers, by regularised least squares. The topology is 1C unless given."""
    from eldr_sim.validation.published import bench as benches
    from eldr_sim.validation.published import calibration as own

    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force")
    options = _launched(launch, options)
    config = config_from_options(options)
    files = [path for path in results if not _has_steps(path)]
    with TemporaryDirectory() as work:
        found, configs = results_and_configs(files, config, options)
        if len({config.engine.model for config in configs}) > 1:
            raise InputError("bench", "results of several models", "one model at a time")
        config = configs[0] if configs else config
        of, free = own.of_config(config), own.freed(config)
        folder = Path(work)
        runs = [own.bench_run(b, c, folder) for b, c in zip(found, configs, strict=True)]
        for path in results:
            if path not in files:
                runs.append(own.steps_run(path.name, benches.read_steps(path), config))
        for each in found:
            for note in each.notes:
                click.echo(f"Warning: {each.name}: {note}", err=True)
        with progress_bar("fitting") as update:
            predictions = own.Predictions(folder)
            by = own.fit(runs, predictions, free)
            predictions.progress = update
            judged = own.held_out(runs, predictions, free) if len(runs) > 1 else []
            following = own.next_run(config, by, predictions, free) if wanted else None
    _print(by, free, judged, following)
    with whole_file(out, "out") as file:
        file.write_text(own.as_yaml(by, of, [run.name for run in runs]), encoding="utf-8")
    click.echo(f"Wrote {out}: --calibration {shlex.quote(str(out))} applies it to {of.model} on "
               f"{of.gpu}")  # fmt: skip


def _launched(launch: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with what a launch line says, and one co-located worker by default."""
    options = dict(options)
    if launch is not None:
        if options.get("engine_args"):
            raise InputError("launch", "--engine-args says it, too", "one of the two")
        options["engine_args"] = launch
        word = next((word for word in _ENGINE_OF if word in launch.partition(" -")[0]), None)
        word = word or next((word for word in _ENGINE_OF if word in launch), None)
        if options.get("engine") is None and word is not None:
            options["engine"] = _ENGINE_OF[word]
    if not any(options.get(name) for name in ("topology", "config_file", "preset")):
        options["topology"] = "1C"
    return options


def _has_steps(path: Path) -> bool:
    """Whether a file holds forward-pass metrics."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "scheduled_requests" in file.readline()


def _print(
    by: "Fit", free: Sequence[bool], judged: Sequence["HeldOut"], following: "NextRun | None"
) -> None:
    from eldr_sim.validation.published import calibration as own

    constants = own.calibration_of(by.values).model_dump()
    cells = [
        [name, f"{constants[name]:.3g}", f"{100 * (1 - share):.0f}%", meaning]
        for (name, meaning), share, moves in zip(
            own.PARAMETERS.items(), by.spread.values(), free, strict=True
        )
        if moves
    ]
    print_table("Fitted", ["constant", "value", "learned", "of"], cells)
    if not judged:
        click.echo("One run predicts none that was left out: measure a second one.")
    else:
        lines = [
            [each.name, each.metric, f"{each.measured:.4g}", f"{each.before:.4g}",
             f"{each.after:.4g}", _percent(each.after, each.measured)]
            for each in judged
        ]  # fmt: skip
        columns = ["run left out", "figure", "measured, ms", "as shipped", "calibrated", "error, %"]
        print_table("Predicted from the other runs", columns, lines)
        for metric in dict.fromkeys(each.metric for each in judged):
            of = [each for each in judged if each.metric == metric]
            before, after = (
                median(100 * abs(getattr(each, name) / each.measured - 1) for each in of)
                for name in ("before", "after")
            )
            click.echo(f"{metric}: median error of runs left out {before:.1f}% as shipped, "
                       f"{after:.1f}% calibrated")  # fmt: skip
    if following is not None:
        named = zip(
            own.PARAMETERS, by.spread.values(), following.spread.values(), free, strict=True
        )
        gains = {name: now - then for name, now, then, moves in named if moves}
        most = max(gains, key=gains.__getitem__)
        click.echo(f"To learn most, measure next: {following.load} (above all of {most}).")


def _percent(value: float, measured: float) -> str:
    return f"{100 * (value / measured - 1):+.1f}"
