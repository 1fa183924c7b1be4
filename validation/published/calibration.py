"""A calibration fitted to measured runs: regularised least squares towards no change.

Parameters are logarithms of three factors and a host gap (`Calibration`). The residual of a figure
is ln(predicted / measured) over `_NOISE`; each parameter is drawn to no change by what it may be
before anything is measured (`_PRIOR`). Both were set before a published run was calibrated.
Gauss-Newton: derivatives come from runs at the start and follow by Broyden's update, since
logarithms of times are nearly linear in those of their factors."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.front_end import NO_FRONT_END
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.calibration import Calibration, Measured
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.validation.published.bench import STEP_KINDS, Step, bench_config, predicted_s
from eldr_sim.validation.published.bench_files import WAVES, Bench

#: Constants by their names in a calibration, with their meaning for a reader.
PARAMETERS = {
    "decode_kernels": "kernels of small steps, which decode",
    "prefill_kernels": "kernels of large steps, which compute prompts",
    "host_gap_ms": "host time of each step in addition, ms",
    "front_end": "API server's time",
}
#: Standard deviations before anything is measured: of logarithms of factors, as large as errors of
#: published runs are, and of 1 ms of host time.
_PRIOR = {"decode_kernels": 0.3, "prefill_kernels": 0.3, "host_gap_ms": 1.0, "front_end": 0.7}
#: Standard deviations of logarithms of measured figures, beyond what the constants explain.
_NOISE = {"tpot": 0.03, "ttft": 0.1}
_STEPS_NOISE = 0.03  #: likewise of the median of an engine's own steps of a kind
_MOST_STEPS = 400  #: of a file that are compared
_STEP = 0.1  #: of a parameter, in `_PRIOR`, for derivatives
_ROUNDS, _SETTLED = 4, 0.02  #: most Gauss-Newton steps; a step so short (in `_PRIOR`) is the last
_FURTHEST = 3.0  #: of a parameter, in `_PRIOR`


@dataclass(frozen=True)
class MeasuredRun:
    """A run, or an engine's steps, that were measured."""

    name: str
    config: RunConfig  #: of the same cluster and load
    measured: Mapping[str, float]  #: by name: ``tpot`` and ``ttft``, or kinds of steps, ms
    #: Returns the same figures of a configuration.
    predict: Callable[[RunConfig], Mapping[str, float]]


def serving_run(
    name: str, config: RunConfig, measured: Mapping[str, float], statistic: str = "mean"
) -> MeasuredRun:
    """Return a run of which ``tpot`` and ``ttft`` were measured, ms; ``statistic``: of requests."""

    def predict(config: RunConfig) -> dict[str, float]:
        summary = simulate_summary(config)
        return {name: float(summary[f"{statistic}_{name}_ms"] or math.nan) for name in measured}

    return MeasuredRun(name, config, measured, predict)


def bench_run(bench: Bench, config: RunConfig, folder: Path) -> MeasuredRun:
    """Return a benchmark's result; raises InputError where it has neither TPOT nor TTFT that can
    be compared. ``folder``: for a log of the lengths."""
    own = folder / f"{len(list(folder.iterdir()))}"
    own.mkdir()
    for statistic in ("mean", "median"):
        measured = {
            name: bench.figures[key]
            for name in _NOISE
            if bench.figures.get(key := f"{statistic}_{name}_ms", 0.0) > 0.0
            and (name != "ttft" or WAVES not in bench.notes)
        }
        if measured:
            return serving_run(bench.name, bench_config(bench, config, own), measured, statistic)
    raise InputError("bench", f"{bench.name} has no TPOT or TTFT", "results that stream tokens")


def steps_run(name: str, steps: Sequence[Step], config: RunConfig) -> MeasuredRun:
    """Return an engine's steps: the medians of each kind; ``config``: of the engine."""
    some = steps[:: -(-len(steps) // _MOST_STEPS)]
    kinds = {kind: [step for step in some if step.kind == kind] for kind in STEP_KINDS}
    kinds = {kind: of for kind, of in kinds.items() if of}

    def predict(config: RunConfig) -> dict[str, float]:
        step_time = prepare(config).spec.pools[-1].engine.step_time
        return {
            kind: 1e3 * float(np.median([predicted_s(step_time, step) for step in of]))
            for kind, of in kinds.items()
        }

    measured = {k: 1e3 * float(np.median([s.seconds for s in of])) for k, of in kinds.items()}
    return MeasuredRun(name, config, measured, predict)


class HeldOut(NamedTuple):
    """A figure of a run: measured, predicted without a calibration and with that of the others."""

    name: str
    metric: str
    measured: float
    before: float
    after: float


@dataclass
class Predictions:
    """Predictions of runs under calibrations, each simulated once. ``folder``: for files."""

    folder: Path
    progress: Progress = no_progress
    _known: dict[tuple[str, tuple[float, ...]], dict[str, float]] = field(default_factory=dict)

    def of(self, run: MeasuredRun, values: Floats) -> dict[str, float]:
        """Return predicted figures, ms, of a run under parameters in units of `_PRIOR`."""
        key = run.name, tuple(np.round(values, 4))
        if key not in self._known:
            path = self.folder / "calibration.json"
            path.write_text(calibration_of(values).model_dump_json(), encoding="utf-8")
            found = run.predict(run.config.replace(calibration=str(path)))
            self._known[key] = dict(found)
        return self._known[key]

    def logs(self, run: MeasuredRun, values: Floats) -> Floats:
        """Return the logarithms of the figures that were measured, over their noise."""
        found = self.of(run, values)
        return np.array([math.log(found[name]) / _noise(name) for name in run.measured])


def calibration_of(values: Floats) -> Calibration:
    """Return the constants of parameters in units of `_PRIOR`."""
    found = {}
    for (name, prior), value in zip(_PRIOR.items(), values.tolist(), strict=True):
        found[name] = prior * value if name == "host_gap_ms" else math.exp(prior * value)
    return Calibration.model_validate(found)


def _inverse(matrix: Floats) -> Floats:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _noise(figure: str) -> float:
    return _NOISE.get(figure, _STEPS_NOISE)


def _target(run: MeasuredRun) -> Floats:
    return np.array([math.log(value) / _noise(name) for name, value in run.measured.items()])


class Fit(NamedTuple):
    """A fit: parameters in units of `_PRIOR`, and their covariance before and after."""

    values: Floats
    covariance: Floats

    @property
    def spread(self) -> dict[str, float]:
        """Standard deviations of the parameters, as shares of those before anything was
        measured."""
        shares = np.sqrt(np.diag(self.covariance)).tolist()
        return dict(zip(_PRIOR, shares, strict=True))


def derivatives(run: MeasuredRun, predictions: Predictions, free: Sequence[bool]) -> Floats:
    """Return derivatives ``[figures, parameters]`` at no change; 0 of parameters held fixed."""
    none = np.zeros(len(_PRIOR))
    base = predictions.logs(run, none)
    columns = []
    for at, moves in enumerate(free):
        step = none.copy()
        step[at] = _STEP
        column = (predictions.logs(run, step) - base) / _STEP if moves else np.zeros_like(base)
        columns.append(column)
    return np.column_stack(columns)


def fit(runs: Sequence[MeasuredRun], predictions: Predictions, free: Sequence[bool]) -> Fit:
    """Return the calibration of measured runs."""
    slopes = np.vstack([derivatives(run, predictions, free) for run in runs])
    target = np.concatenate([_target(run) for run in runs])

    def residuals(values: Floats) -> Floats:
        off: Floats = np.concatenate([predictions.logs(run, values) for run in runs]) - target
        return off

    def cost(found: Floats, values: Floats) -> float:
        return float(found @ found + values @ values)

    values = np.zeros(len(_PRIOR))
    found = residuals(values)
    eye = np.eye(len(_PRIOR))
    for _ in range(_ROUNDS):
        aim = np.linalg.solve(slopes.T @ slopes + eye, slopes.T @ (slopes @ values - found))
        step = np.clip(aim, -_FURTHEST, _FURTHEST) - values
        if np.abs(step).max() < _SETTLED:
            break
        other = residuals(values + step)
        slopes = slopes + np.outer(other - found - slopes @ step, step) / (step @ step)
        if cost(other, values + step) < cost(found, values):
            values, found = values + step, other
    return Fit(values, _inverse(slopes.T @ slopes + eye))


def freed(config: RunConfig) -> list[bool]:
    """Return which parameters a configuration has: without API servers no front end."""
    served = config.front_end.frontend.lower() != NO_FRONT_END
    return [name != "front_end" or served for name in _PRIOR]


def held_out(
    runs: Sequence[MeasuredRun], predictions: Predictions, free: Sequence[bool]
) -> list[HeldOut]:
    """Return each run's figures under the calibration of all others."""
    found = []
    for number, run in enumerate(runs):
        others = [*runs[:number], *runs[number + 1 :]]
        found += judged(run, fit(others, predictions, free), predictions)
        predictions.progress((number + 1) / len(runs))
    return found


def judged(run: MeasuredRun, by: Fit, predictions: Predictions) -> list[HeldOut]:
    """Return a run's figures beside predictions without a calibration and with one."""
    before, after = (predictions.of(run, v) for v in (np.zeros(len(_PRIOR)), by.values))
    return [
        HeldOut(run.name, metric, value, before[metric], after[metric])
        for metric, value in run.measured.items()
    ]


#: Loads that may be measured next, with their changes of a run: requests in flight, prompt and
#: output tokens.
_LOADS = {
    "1 request in flight, prompts of 8,000 tokens and 64 output tokens": (1, 8000, 64),
    "1 request in flight, prompts of 128 tokens and 256 output tokens": (1, 128, 256),
    "16 requests in flight, prompts of 1,000 tokens and 256 output tokens": (16, 1000, 256),
    "64 requests in flight, prompts of 1,000 tokens and 256 output tokens": (64, 1000, 256),
}


class NextRun(NamedTuple):
    """A load that would teach the most, and what it leaves of each constant's spread."""

    load: str
    spread: dict[str, float]


def next_run(
    config: RunConfig, by: Fit, predictions: Predictions, free: Sequence[bool]
) -> NextRun | None:
    """Return the load after which the constants that are fitted are known best: the largest
    determinant of their information (D-optimal); None where no load fits the model."""
    best: tuple[float, NextRun] | None = None
    information = np.linalg.inv(by.covariance)
    for load, (together, prompt, output) in _LOADS.items():
        changes: dict[str, Any] = {
            "workload": "task", "request_rate": "inf", "max_concurrency": together,
            "num_requests": max(4, 2 * together), "input_len": prompt, "output_len": output,
            "duration": None, "prefix_len": 0, "random_range_ratio": 0.0, "length_shape": None,
            "columns": None, "arrivals": None, "load": None,
        }  # fmt: skip
        try:
            run = serving_run(load, config.replace(**changes), {"tpot": 1.0, "ttft": 1.0})
            slopes = derivatives(run, predictions, free)
        except InputError:  # longer than the model's contexts
            continue
        more = information + slopes.T @ slopes
        gain = float(np.linalg.slogdet(more)[1])
        if best is None or gain > best[0]:
            best = gain, NextRun(load, Fit(by.values, _inverse(more)).spread)
    return None if best is None else best[1]


def of_config(config: RunConfig) -> Measured:
    """Return what a configuration's runs are of; raises InputError where pools differ."""
    gpus = {load_gpu(pool.gpu or config.cluster.gpu).name for pool in config.pools}
    if len(gpus) > 1:
        raise InputError("gpu", f"pools on {' and '.join(sorted(gpus))}", "one kind of GPU")
    model = load_model(config.engine.model).name
    return Measured(model=model, gpu=gpus.pop(), engine=config.engine.engine)


def as_yaml(by: Fit, of: Measured, runs: Sequence[str]) -> str:
    """Return a calibration's file."""
    import yaml

    said = f"eldr-sim {version('eldr-sim')}, {_today()}, from {', '.join(runs)}"
    found = calibration_of(by.values).model_copy(update={"of": of, "made": said})
    values = found.model_dump(exclude_none=True)
    values = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%d %B %Y")
