"""A user's own benchmark beside the simulator's prediction of the same load.

Results of ``vllm bench serve`` (``--save-result``, better with ``--save-detailed``), which SGLang's
``bench_serving`` writes alike, and of aiperf (``profile_export_aiperf.json``).
"""

import csv
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config import RunConfig
from eldr_sim.traces.requests.arrivals import MOST_BURSTINESS

_METRICS = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = ("mean", "median", "p90", "p99")
#: aiperf's names of metrics and statistics.
_AIPERF = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2el"}
_AIPERF_STATISTICS = {"avg": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
_LARGEST_GAP_MS = 50.0


@dataclass(frozen=True)
class Bench:
    """A result of a benchmark."""

    name: str
    figures: Mapping[str, float]  #: ms, by the names of ``vllm bench serve``
    load: Mapping[str, Any]  #: fields of a run
    #: Prompt and output tokens of each request, where the file has them.
    lengths: tuple[tuple[int, int], ...] = ()


def read_bench(path: Path) -> Bench:
    """Read a benchmark's result; raises InputError if it is none."""
    try:
        found = json.loads(read_text(path, "bench"))
    except ValueError:
        raise InputError("bench", f"{path} is no JSON", "a result of vllm bench serve") from None
    try:
        if isinstance(found, dict) and any(name in found for name in _AIPERF):
            return _aiperf(path.name, found)
        return _vllm(path, found)
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"{path} is not read: {type(error).__name__}: {error}"
        raise InputError("bench", problem, "numbers, as its benchmark writes them") from None


def _vllm(path: Path, found: Any) -> Bench:
    keys = [f"{s}_{m}_ms" for m in _METRICS for s in _STATISTICS]
    if not isinstance(found, dict) or "mean_ttft_ms" not in found:
        problem = f"{path} has no mean_ttft_ms"
        raise InputError("bench", problem, "a result of vllm bench serve, or aiperf's")
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
    given = found.get("input_config", {}).get("loadgen", {})
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


def predict_bench(bench: Bench, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the summary of a run of the same load.

    ``config``: what the user says of the cluster; ``folder``: for a log of the lengths.
    """
    load = dict(bench.load)
    if bench.lengths:
        log = folder / "lengths.csv"
        with log.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
            day = datetime.datetime(2026, 1, 1)  # when they came is the load's
            for i, both in enumerate(bench.lengths):
                lines.writerow([day + datetime.timedelta(milliseconds=i), *both])
        load |= {"workload": str(log), "num_requests": len(bench.lengths)}
        if not math.isinf(float(load["request_rate"])):
            load["arrivals"] = "poisson"
    return simulate(config.replace(**load)).summary


def errors(bench: Bench, summary: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
    """Return figure, measured, predicted and error in % of what both have."""
    return [
        (key, measured, float(summary[key]), 100.0 * (float(summary[key]) / measured - 1.0))
        for key, measured in bench.figures.items()
        if summary.get(key) is not None and measured > 0.0
    ]


def calibrate(benches: Sequence[Bench], config: RunConfig, folder: Path) -> float:
    """Return the ``host_gap_ms`` at which mean TPOT is right in the mean of the benchmarks.

    Found by halving; it is what kernels do not explain, at least 0 and at most 50 ms.
    """

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
