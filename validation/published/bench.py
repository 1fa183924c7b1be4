"""A user's own benchmark beside the simulator's prediction of the same load.

Results of ``vllm bench serve`` (``--save-result``, better with ``--save-detailed``), which SGLang's
``bench_serving`` writes alike, of aiperf (``profile_export_aiperf.json``) and of GuideLLM
(``guidellm run --output kind=json``), whose TPOT divides by all tokens: its ITL is our TPOT.

Engine steps are lines of JSON, as Dynamo, SGLang (``--enable-forward-pass-metrics``) and vLLM
publish them (`ForwardPassMetrics`): ``wall_time``, s, and ``scheduled_requests``: prompts and
sequences of a step, their new tokens, and what the KV cache held of each. Single prompts are not
told apart: each has its share of both. Uniform routing is expected."""

import csv
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.requests.arrivals import MOST_BURSTINESS
from eldr_sim.traces.requests.logs.benchmark_logs import guidellm_requests, is_guidellm

_METRICS = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = ("mean", "median", "p90", "p99")
#: aiperf's names of metrics and statistics.
_AIPERF = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2el"}
_AIPERF_STATISTICS = {"avg": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
#: GuideLLM's names of metrics, and what makes milliseconds of them.
_GUIDELLM = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "inter_token_latency_ms": ("tpot", 1.0),
    "request_latency": ("e2el", 1e3),
}
_LARGEST_GAP_MS = 50.0


@dataclass(frozen=True)
class Bench:
    """A result of a benchmark."""

    name: str
    figures: Mapping[str, float]  #: ms, by the names of ``vllm bench serve``
    load: Mapping[str, Any]  #: fields of a run
    #: Prompt and output tokens of each request, where the file has them.
    lengths: tuple[tuple[int, int], ...] = ()
    #: When each was sent, s, where the load came at given times.
    arrivals_s: tuple[float, ...] = ()


def read_bench(path: Path) -> list[Bench]:
    """Read a benchmark's result, of a sweep several; raises InputError if it is none."""
    try:
        found = json.loads(read_text(path, "bench"))
    except ValueError:
        raise InputError("bench", f"{path} is no JSON", "a result of vllm bench serve") from None
    try:
        if isinstance(found, dict) and any(name in found for name in _AIPERF):
            return [_aiperf(path.name, found)]
        if is_guidellm(found):
            return [_guidellm(path, each) for each in found["benchmarks"]]
        return [_vllm(path, found)]
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"{path} is not read: {type(error).__name__}: {error}"
        raise InputError("bench", problem, "numbers, as its benchmark writes them") from None


def _vllm(path: Path, found: Any) -> Bench:
    keys = [f"{s}_{m}_ms" for m in _METRICS for s in _STATISTICS]
    if not isinstance(found, dict) or "mean_ttft_ms" not in found:
        problem = f"{path} has no mean_ttft_ms"
        raise InputError("bench", problem, "a result of vllm bench serve, aiperf or GuideLLM")
    figures = {key: float(found[key]) for key in keys if found.get(key) is not None}
    n = int(found.get("completed") or found.get("num_prompts") or 0)
    if n < 1:
        raise InputError("bench", f"{path}: no request completed", "a run that did something")
    rate = found.get("request_rate", "inf")
    load: dict[str, Any] = {"num_requests": n, "request_rate": rate if rate is not None else "inf"}
    if found.get("max_concurrency"):
        load["max_concurrency"] = int(found["max_concurrency"])
    if found.get("burstiness") and not math.isinf(float(rate or "inf")):
        load["burstiness"] = float(found["burstiness"])
    prompts, outputs = found.get("input_lens") or [], found.get("output_lens") or []
    lengths = tuple((int(a), int(b)) for a, b in zip(prompts, outputs, strict=False) if b)
    if not lengths:
        load["input_len"] = max(1, round(float(found["total_input_tokens"]) / n))
        load["output_len"] = max(1, round(float(found["total_output_tokens"]) / n))
    return Bench(path.name, figures, load, lengths)


def _aiperf(name: str, found: Mapping[str, Any]) -> Bench:
    figures = {
        f"{of}_{ours}_ms": float(found[theirs][statistic])
        for theirs, ours in _AIPERF.items()
        for statistic, of in _AIPERF_STATISTICS.items()
        if theirs in found and found[theirs].get(statistic) is not None
    }
    given = _aiperf_load(name, found.get("input_config", {}))
    load: dict[str, Any] = {"request_rate": given.get("request_rate") or "inf"}
    pattern = given.get("arrival_pattern") or given.get("request_rate_mode")
    if given.get("request_rate") and pattern == "constant":
        load["burstiness"] = MOST_BURSTINESS
    elif given.get("request_rate") and pattern == "gamma":
        load["burstiness"] = float(given.get("arrival_smoothness") or 1.0)
    if given.get("concurrency"):
        load["max_concurrency"] = int(given["concurrency"])
    load["num_requests"] = int(found.get("request_count", {}).get("avg") or 0)
    for theirs, ours in (("input", "input_len"), ("output", "output_len")):
        tokens = found.get(f"{theirs}_sequence_length", {}).get("avg")
        if tokens is None or not load["num_requests"]:
            raise InputError("bench", f"{name} lacks request_count or {theirs}_sequence_length")
        load[ours] = max(1, round(float(tokens)))
    return Bench(name, figures, load)


def _aiperf_load(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the load by its names in older versions; since 0.13 it is a phase."""
    phases = [p for p in config.get("phases") or () if p.get("kind") == "profiling"]
    if not phases:
        if "loadgen" in config:
            known: Mapping[str, Any] = config["loadgen"]
            return known
        raise InputError("bench", f"{name} does not say its load", "input_config of aiperf")
    phase = phases[-1]
    if phase["type"] not in ("concurrency", "poisson", "gamma", "constant"):
        problem = f"{name} has arrivals of {phase['type']}"
        raise InputError("bench", problem, "a rate or a concurrency; run --workload replays others")
    return {
        "request_rate": phase.get("rate"),
        "arrival_pattern": phase["type"],
        "arrival_smoothness": phase.get("smoothness"),
        "concurrency": phase.get("concurrency"),
    }


def _guidellm(path: Path, found: Mapping[str, Any]) -> Bench:
    figures = {}
    for theirs, (ours, factor) in _GUIDELLM.items():
        known = (found["metrics"].get(theirs) or {}).get("successful") or {}
        known = known | {f"p{n}": known.get("percentiles", {}).get(f"p{n}") for n in (90, 99)}
        for of in _STATISTICS:
            if known.get(of) is not None:
                figures[f"{of}_{ours}_ms"] = factor * float(known[of])
    strategy = found["config"]["strategy"]
    kind, rate = strategy["type_"], strategy.get("rate")
    name = f"{path.name}, {kind}"
    requests = list(guidellm_requests(path, found))
    if not requests:
        raise InputError("bench", f"{name}: no request completed", "a run that did something")
    lengths = tuple((request.prompt, request.output) for request in requests)
    if rate is not None:
        arrivals = tuple(request.when_ns / 1e9 for request in requests)
        return Bench(f"{name} at {rate:g}/s", figures, {}, lengths, arrivals)
    together = 1 if kind == "synchronous" else strategy.get("streams", strategy["max_concurrency"])
    load = {"request_rate": "inf", "max_concurrency": together or len(lengths)}
    return Bench(f"{name} of {load['max_concurrency']}", figures, load, lengths)


def predict_bench(bench: Bench, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the summary of a run of the same load; ``folder``: for a log of the lengths."""
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
    return simulate(config.replace(**load)).summary


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
            " --calibrate finds; or kernels of another version than the tables'."
        )
    elif missing < -0.03 * measured:
        said.append(
            "TPOT: kernels are faster than the tables', or prompts that were found in a prefix"
            " cache are computed here."
        )
    measured, found = known.get("mean_ttft_ms", (1.0, 1.0))
    if found < 0.9 * measured and config.front_end.frontend in (None, "none"):
        said.append("TTFT: no API server is simulated, see --frontend.")
    elif found < 0.9 * measured:
        said.append("TTFT: the host launches or tokenises more slowly, or requests waited.")
    if said:
        step_time = prepare(config).spec.pools[-1].engine.step_time
        origins = {str(part.get("origin", "")) for part in step_time.provenance.values()}
        said.append(f"The tables are of {', '.join(sorted(origins - {''}))}.")
    return said


def calibrate(benches: Sequence[Bench], config: RunConfig, folder: Path) -> float:
    """Return the ``host_gap_ms``, 0 to 50, at which mean TPOT is right in the mean, by halving."""

    for bench in benches:
        if not bench.figures.get("mean_tpot_ms", 0.0) > 0.0:
            raise InputError("calibrate", f"{bench.name} has no TPOT", "results of several tokens")

    def bias(gap_ms: float) -> float:
        with_gap = config.replace(host_gap_ms=gap_ms)
        ratios = []
        for bench in benches:
            summary = predict_bench(bench, with_gap, folder)
            ratios.append(math.log(summary["mean_tpot_ms"] / bench.figures["mean_tpot_ms"]))
        return sum(ratios) / len(ratios)

    low, high = 0.0, _LARGEST_GAP_MS
    if bias(low) >= 0.0:
        return low
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (middle, high) if bias(middle) < 0.0 else (low, middle)
    return round((low + high) / 2, 2)


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
    found = []
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
            found.append(step)
    if not found:
        raise InputError("steps", f"{path} holds no step that computed anything", "one a line")
    return found


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
    for kind in ("decoding", "prompts", "both"):
        of = np.array([step.kind == kind for step in steps])
        if of.any():
            errors = 100.0 * (predicted[of] / measured[of] - 1.0)
            figures = [1e3 * np.median(measured[of]), 1e3 * np.median(predicted[of])]
            figures += [np.median(np.abs(errors)), np.median(errors)]
            yield kind, int(of.sum()), [float(figure) for figure in figures]
