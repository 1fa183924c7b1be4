"""A user's own benchmark (`bench_files`) beside the simulator's prediction of the same load.

Engine steps are lines of JSON, as Dynamo, SGLang (``--enable-forward-pass-metrics``) and vLLM
publish them (`ForwardPassMetrics`): ``wall_time``, s, and ``scheduled_requests``: prompts and
sequences of a step, their new tokens, and what the KV cache held of each. Single prompts are not
told apart: each has its share of both. Uniform routing is expected."""

import csv
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kernel_profiles.kernels.front_end import NO_FRONT_END
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.validation.published.bench_files import Bench, read_bench

__all__ = [
    "STEP_KINDS", "Bench", "Step", "bench_config", "beside", "errors", "explanations",
    "predict_bench", "predicted_s", "read_bench", "read_steps", "with_model",
]  # fmt: skip

#: What a step holds, in words.
STEP_KINDS = ("decoding", "prompts", "both")


def predict_bench(bench: Bench, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the summary of a run of the same load; ``folder``: for a log of the lengths."""
    return simulate(bench_config(bench, config, folder)).summary


def bench_config(bench: Bench, config: RunConfig, folder: Path) -> RunConfig:
    """Return a configuration with the load of a result; ``folder``: for a log of the lengths."""
    load = dict(bench.load)
    if bench.lengths:
        log = folder / "lengths.csv"
        with log.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
            day = datetime.datetime(2026, 1, 1)  # when they came is the load's
            begin = min(bench.arrivals_s, default=0.0)
            when = bench.arrivals_s or [i / 1e3 for i in range(len(bench.lengths))]
            for at, both in zip(when, bench.lengths, strict=True):
                lines.writerow([day + datetime.timedelta(seconds=at - begin), *both])
        load |= {"workload": str(log), "num_requests": len(bench.lengths)}
        if not bench.arrivals_s and not math.isinf(float(load["request_rate"])):
            load["arrivals"] = "poisson"
    return config.replace(**load)


def with_model(bench: Bench, config: RunConfig, *, given: bool) -> RunConfig:
    """Return a configuration of the model that a result is of; raises InputError where another is
    requested, or none is known. ``given``: whether the configuration's was requested."""
    measured = None
    for name in (bench.model, bench.model.rstrip("/").rpartition("/")[2]):
        try:
            measured = load_model(name) if name else None
            break
        except InputError:
            continue
    model = config.engine.model
    if measured is None and not given:
        what = f"is of {bench.model!r}, no known model" if bench.model else "names no model"
        raise InputError("model", f"{bench.name} {what}", "--model NAME, or its config.json")
    if measured is None:
        return config
    if given and load_model(model).name != measured.name:
        problem = f"got {model}, but {bench.name} is of {bench.model}"
        raise InputError("model", problem, f"{measured.name}, or none: the result says it")
    return config if given else config.replace(model=measured.name)


def errors(bench: Bench, summary: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
    """Return figure, measured, predicted and error in % of what both have."""
    return [
        (key, measured, float(summary[key]), 100.0 * (float(summary[key]) / measured - 1.0))
        for key, measured in bench.figures.items()
        if summary.get(key) is not None and measured > 0.0
    ]


def explanations(bench: Bench, summary: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return what would explain the errors of means, a sentence each; none where both are small."""
    known = {name: (measured, found) for name, measured, found, _ in errors(bench, summary)}
    said = []
    measured, found = known.get("mean_tpot_ms", (1.0, 1.0))
    missing = measured - found
    if missing > 0.03 * measured:
        said.append(
            f"TPOT: {missing:.2f} ms more of the host in each step would explain it, which"
            " eldr-sim calibrate finds; or kernels of another version than the tables'."
        )
    elif missing < -0.03 * measured:
        said.append(
            "TPOT: kernels are faster than the tables', or prompts that were found in a prefix"
            " cache are computed here."
        )
    measured, found = known.get("mean_ttft_ms", (1.0, 1.0))
    if found < 0.9 * measured and config.front_end.frontend.lower() == NO_FRONT_END:
        said.append("TTFT: no API server is simulated, see --frontend.")
    elif found < 0.9 * measured:
        said.append("TTFT: the host launches or tokenises more slowly, or requests waited.")
    if said:
        step_time = prepare(config).spec.pools[-1].engine.step_time
        origins = {str(part.get("origin", "")) for part in step_time.provenance.values()}
        said.append(f"The tables are of {', '.join(sorted(origins - {''}))}.")
    return said


_COUNTS = {
    "prompts": "num_prefill_requests",
    "prompt_tokens": "sum_prefill_tokens",
    "cached_tokens": "sum_prefill_kv_tokens",
    "sequences": "num_decode_requests",
    "context": "sum_decode_kv_tokens",
}


class Step(NamedTuple):
    """What a step computed, and the seconds that it took."""

    seconds: float
    prompts: int
    prompt_tokens: int  #: computed in the step, of all prompts
    cached_tokens: int  #: of the prompts, computed before
    sequences: int  #: that got their next token
    context: int  #: tokens of these, all together

    @property
    def kind(self) -> str:
        """What it held, in words."""
        both = (self.prompts > 0, self.sequences > 0)
        return {(True, True): "both", (True, False): "prompts"}.get(both, "decoding")


def read_steps(path: Path) -> list[Step]:
    """Read the steps of a file, idle ones left out; raises InputError where a line is none."""
    steps = []
    for number, line in enumerate(read_text(path, "steps").splitlines(), 1):
        if not line.strip():
            continue
        try:
            known = json.loads(line)
            counts = known["scheduled_requests"]
            values = {ours: int(counts.get(theirs, 0)) for ours, theirs in _COUNTS.items()}
            step = Step(float(known["wall_time"]), **values)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            problem = f"line {number} of {path}: {type(error).__name__}: {error}"
            raise InputError("steps", problem, "wall_time and scheduled_requests") from None
        if min(step) < 0 or not np.isfinite(step.seconds):
            raise InputError("steps", f"line {number} of {path} has {min(step):g}", "0 or more")
        if step.seconds > 0.0 and (step.sequences or step.prompt_tokens >= step.prompts > 0):
            steps.append(step)
    if not steps:
        raise InputError("steps", f"{path} holds no step that computed anything", "one a line")
    return steps


def predicted_s(step_time: StepTimeModel, step: Step) -> float:
    """Return what a step takes; raises InputError where it is larger than the engine allows."""
    spread = [(step.cached_tokens, step.prompt_tokens)] if step.prompts else []
    chunks = [
        ((first + i) // step.prompts, (tokens + i) // step.prompts)
        for first, tokens in spread
        for i in range(step.prompts)
    ]
    activated = None
    if not chunks and step_time.n_moe_layers:
        model = step_time.model
        missed = (1.0 - model.top_k / model.n_experts) ** step.sequences
        activated = [model.n_experts * (1.0 - missed)] * step_time.n_moe_layers
    return float(sum(step_time.parts(step.sequences, step.context, chunks, activated)))


def beside(steps: Sequence[Step], config: RunConfig) -> Iterator[tuple[str, int, list[float]]]:
    """Yield kinds of steps: how many, and the median ms measured and predicted, and of the errors.
    The errors are in %: the median of their sizes, and the signed one. ``config``: of the
    engine."""
    pools = prepare(config).spec.pools
    step_time = pools[-1].engine.step_time
    predicted = np.array([predicted_s(step_time, step) for step in steps])
    measured = np.array([step.seconds for step in steps])
    for kind in STEP_KINDS:
        of = np.array([step.kind == kind for step in steps])
        if of.any():
            errors = 100.0 * (predicted[of] / measured[of] - 1.0)
            figures = [1e3 * np.median(measured[of]), 1e3 * np.median(predicted[of])]
            figures += [np.median(np.abs(errors)), np.median(errors)]
            yield kind, int(of.sum()), [float(figure) for figure in figures]
