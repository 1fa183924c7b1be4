"""Results of a user's own benchmark.

Results of ``vllm bench serve`` (``--save-result``, better with ``--save-detailed``), which SGLang's
``bench_serving`` writes alike, of aiperf (``profile_export_aiperf.json``), of GuideLLM
(``guidellm run --output kind=json``), where TPOT divides by all tokens: its ITL is our TPOT, and of
inference-perf (``per_request_lifecycle_metrics.json``)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.traces.requests.arrivals import MOST_BURSTINESS
from eldr_sim.traces.requests.logs.benchmark_logs import guidellm_requests, is_guidellm, stated_load
from eldr_sim.traces.requests.logs.formats import refused_format
from eldr_sim.traces.streams import stream

_METRICS = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = ("mean", "median", "p90", "p99")
#: A note of results that say mean lengths alone.
WAVES = (
    "the file has mean lengths alone: requests that are all alike run in waves, so TTFT is not "
    "comparable (--save-detailed, SGLang: --output-details)"
)
_DRAWN_OTHERWISE = 0.1  # means so far from what a rule gives are of another
#: aiperf's names of metrics and statistics.
_AIPERF = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2el"}
_THROUGHPUT = {
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "benchmark_duration": "duration",
}
_AIPERF_STATISTICS = {"avg": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
_UNIT_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "µs": 1e-3, "ns": 1e-6}
#: GuideLLM's names of metrics, and what makes milliseconds of them.
_GUIDELLM = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "inter_token_latency_ms": ("tpot", 1.0),
    "request_latency": ("e2el", 1e3),
}


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
    model: str = ""  #: that was served, where the file says it
    engine: str = ""
    sent: int = 0  #: requests, those that failed among them; 0: the file does not say
    notes: tuple[str, ...] = ()  #: what is taken for something else

    def in_words(self) -> str:
        """Return what was measured, in a line."""
        done = len(self.lengths) or int(self.load.get("num_requests", 0))
        said = [f"{done:,} requests"]
        if self.sent > done:
            said[0] = f"{done:,} of {self.sent:,} requests ({self.sent - done:,} without an answer)"
        if self.arrivals_s:
            said.append(f"as sent over {max(self.arrivals_s) - min(self.arrivals_s):,.4g} s")
        elif (rate := self.load.get("request_rate")) is not None:
            said.append("all at once" if math.isinf(float(rate)) else f"{float(rate):g}/s")
        if most := self.load.get("max_concurrency"):
            said.append(f"{most} in flight at most")
        if self.lengths:
            means = (sum(each) / done for each in zip(*self.lengths, strict=True))
        else:
            means = (float(self.load.get(name, 0)) for name in ("input_len", "output_len"))
        said.append("{:,.0f} and {:,.0f} tokens in the mean".format(*means))
        of = self.model or "a model that the file does not name"
        engine = f" on {self.engine}" if self.engine else ""
        return f"{of}{engine}: {', '.join(said)}"

    @property
    def served_by(self) -> str:
        """The engine, if its name is one: ``vllm`` stands for every server of OpenAI's API."""
        name = self.engine.lower()
        found = {"sglang": "sglang", "trt": "trtllm", "tensorrt": "trtllm"}
        return next((engine for word, engine in found.items() if name.startswith(word)), "")


#: Times below which a figure is none of a server's, ms.
_LEAST_MS = {f"{s}_{m}_ms": ms for s in _STATISTICS for m, ms in (("tpot", 0.1), ("ttft", 0.2))}


def read_bench(path: Path) -> list[Bench]:
    """Read a benchmark's result, of a sweep several; raises InputError if it is none."""
    text = read_text(path, "bench")
    try:
        found = json.loads(text)
    except ValueError:
        try:  # SGLang's bench_serving appends a line per run
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            found = []
        if not found:
            allowed = "a result of vllm bench serve"
            raise InputError("bench", f"{path} is not JSON", allowed) from None
    benches = _benches(path, found)
    for bench in benches:
        _check_figures(path, bench.figures)
    return benches


def _check_figures(path: Path, figures: Mapping[str, float]) -> None:
    """Raise InputError for a figure that no server has, such as seconds for milliseconds."""
    for name, value in figures.items():
        if not value >= 0.0 or math.isinf(value):
            raise InputError("bench", f"{path}: {name} is {value:g}", "a number from 0 on")
        if name in _LEAST_MS and 0.0 < value < _LEAST_MS[name]:
            problem = f"{path}: {name} is {value:g}, less than any server's: is it in seconds?"
            raise InputError("bench", problem, "milliseconds, as its name says")


def _amount(where: object, name: str, value: Any) -> float:
    """Return a number of a file; raises InputError for a switch or a text in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError("bench", f"{where}: {name} is {value!r:.40}", "a number from 0 on")
    return float(value)


def _count(where: object, name: str, value: Any) -> int:
    """Return a number of requests or tokens, 0 for none given; raises InputError for others."""
    number = _amount(where, name, 0 if value is None else value)
    if not (number >= 0 and number.is_integer()):
        raise InputError("bench", f"{where}: {name} is {value!r:.40}", "a whole number from 0 on")
    return int(number)


def _benches(path: Path, found: Any) -> list[Bench]:
    try:
        if isinstance(found, list):
            if not found or not all(isinstance(r, dict) and "mean_ttft_ms" in r for r in found):
                return [_lifecycle(path, found)]
            return [
                replace(_vllm(path, each), name=f"{path.name}, result {number}")
                for number, each in enumerate(found, 1)
            ]
        if isinstance(found, dict) and any(name in found for name in _AIPERF):
            return [_aiperf(path.name, found)]
        if (refused := refused_format("", found)) is not None:
            raise InputError("bench", f"{path} is not supported: {refused.about}", refused.way)
        if is_guidellm(found):
            return [_guidellm(path, benchmark) for benchmark in found["benchmarks"]]
        return [_vllm(path, found)]
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"{path} is not read: {type(error).__name__}: {error}"
        if isinstance(error, KeyError):
            problem = f"{path} lacks {error.args[0]}"
        raise InputError("bench", problem, "numbers, as its benchmark writes them") from None


def _vllm(path: Path, found: Any) -> Bench:
    keys = [f"{s}_{m}_ms" for m in _METRICS for s in _STATISTICS]
    if not isinstance(found, dict) or "mean_ttft_ms" not in found:
        problem = f"{path} has no mean_ttft_ms"
        raise InputError("bench", problem, "a result of vllm bench serve, aiperf or GuideLLM")
    figures = {key: _amount(path, key, found[key]) for key in keys if found.get(key) is not None}
    for key in ("request_throughput", "output_throughput", "duration"):
        if _amount(path, key, 0.0 if found.get(key) is None else found[key]):
            figures[key] = float(found[key])
    counts = ("completed", "num_prompts", "failed", "max_concurrency")
    done, asked, failed, together = (_count(path, name, found.get(name)) for name in counts)
    n = asked if found.get("completed") is None else done
    if n < 1:
        raise InputError("bench", f"{path}: no request completed", "a run with completed requests")
    rate = found.get("request_rate", "inf")
    load: dict[str, Any] = {"num_requests": n, "request_rate": rate if rate is not None else "inf"}
    if together:
        load["max_concurrency"] = together
    if found.get("burstiness") and not math.isinf(float(rate or "inf")):
        load["burstiness"] = _amount(path, "burstiness", found["burstiness"])
    prompts, outputs = found.get("input_lens") or [], found.get("output_lens") or []
    if len(prompts) != len(outputs):
        problem = f"{path}: input_lens of {len(prompts)} requests, output_lens of {len(outputs)}"
        raise InputError("bench", problem, "as many, or neither")
    columns = zip(prompts, outputs, strict=True)
    pairs = ((_count(path, "input_lens", a), _count(path, "output_lens", b)) for a, b in columns)
    lengths = tuple((a, b) for a, b in pairs if b)
    notes: tuple[str, ...] = ()
    if not lengths:
        totals = [f"total_{kind}_tokens" for kind in ("input", "output")]
        means = [_amount(path, name, found[name]) / n for name in totals]
        lengths = _random_lengths(found, means, n)
        if lengths:
            notes = ("lengths drawn again as its benchmark draws them (random_range_ratio)",)
        else:
            load["input_len"], load["output_len"] = (max(1, round(mean)) for mean in means)
            notes = _waves(load)
    stated = stated_load(path, found)
    sent = max(len(prompts), asked, n + failed)
    return Bench(path.name, figures, load, lengths, (), stated.model, stated.engine, sent, notes)


def _random_lengths(
    found: Mapping[str, Any], means: Sequence[float], n: int
) -> tuple[tuple[int, int], ...]:
    """Return lengths as SGLang's ``bench_serving`` draws random ones, evenly from a share of the
    longest to it; none where the means tell that it drew others."""
    drawn = []
    for kind, mean in zip(("input", "output"), means, strict=True):
        longest, share = found.get(f"random_{kind}_len"), found.get("random_range_ratio")
        if found.get("dataset_name") != "random" or longest is None or share is None:
            return ()
        low, high = max(1, int(float(longest) * float(share))), int(longest)
        if not low <= high or abs((low + high) / 2.0 / mean - 1.0) > _DRAWN_OTHERWISE:
            return ()
        drawn.append(stream(0, f"{kind} lengths of a result").integers(low, high + 1, n).tolist())
    return tuple(zip(*drawn, strict=True))


def _waves(load: Mapping[str, Any]) -> tuple[str, ...]:
    """Warn where requests that are alike keep in step, as measured ones did not."""
    together = int(load.get("max_concurrency") or 0)
    if not math.isinf(float(load["request_rate"] or "inf")) or together == 1:
        return ()
    return (WAVES,)


def _aiperf(name: str, found: Mapping[str, Any]) -> Bench:
    figures = {
        f"{of}_{ours}_ms": _ms_of(name, theirs, found[theirs])
        * _amount(name, theirs, found[theirs][statistic])
        for theirs, ours in _AIPERF.items()
        for statistic, of in _AIPERF_STATISTICS.items()
        if theirs in found and found[theirs].get(statistic) is not None
    }
    aiperf_load = _aiperf_load(name, found.get("input_config", {}))
    load: dict[str, Any] = {"request_rate": aiperf_load.get("request_rate") or "inf"}
    pattern = aiperf_load.get("arrival_pattern") or aiperf_load.get("request_rate_mode")
    if aiperf_load.get("request_rate") and pattern == "constant":
        load["burstiness"] = MOST_BURSTINESS
    elif aiperf_load.get("request_rate") and pattern == "gamma":
        load["burstiness"] = float(aiperf_load.get("arrival_smoothness") or 1.0)
    if aiperf_load.get("concurrency"):
        load["max_concurrency"] = _count(name, "concurrency", aiperf_load["concurrency"])
    done = found.get("request_count", {}).get("avg")
    load["num_requests"] = _count(name, "request_count", done)
    for theirs, ours in (("input", "input_len"), ("output", "output_len")):
        tokens = found.get(f"{theirs}_sequence_length", {}).get("avg")
        if tokens is None or not load["num_requests"]:
            raise InputError("bench", f"{name} lacks request_count or {theirs}_sequence_length")
        load[ours] = max(1, round(_amount(name, f"{theirs}_sequence_length", tokens)))
    for theirs, ours in _THROUGHPUT.items():
        if isinstance(found.get(theirs), Mapping) and (found[theirs].get("avg") or 0) > 0:
            figures[ours] = _amount(name, theirs, found[theirs]["avg"])
            if ours == "duration":
                figures[ours] *= _ms_of(name, theirs, {"unit": "s"} | found[theirs]) / 1e3
    spread = [found[f"{kind}_sequence_length"].get("std") for kind in ("input", "output")]
    lengths: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    if None in spread:
        notes = _waves(load)
    elif any(spread):
        lengths = _normal_lengths(found, load["num_requests"])
        notes = ("lengths drawn again with the file's means and standard deviations",)
        del load["input_len"], load["output_len"]
    failed = (found.get("error_request_count") or {}).get("avg")
    sent = load["num_requests"] + _count(name, "error_request_count", failed)
    model = _aiperf_model(found.get("input_config", {}))
    return Bench(name, figures, load, lengths, (), model, "", sent, notes)


def _ms_of(name: str, metric: str, known: Mapping[str, Any]) -> float:
    """Return the milliseconds of a metric's unit; aiperf writes it beside the statistics."""
    unit = str(known.get("unit") or "ms")
    if unit not in _UNIT_MS:
        raise InputError("bench", f"{name}: {metric} in {unit}", ", ".join(_UNIT_MS))
    return _UNIT_MS[unit]


def _normal_lengths(found: Mapping[str, Any], n: int) -> tuple[tuple[int, int], ...]:
    """Return lengths with aiperf's means and deviations: it draws synthetic ones so."""
    drawn = []
    for kind in ("input", "output"):
        known = found[f"{kind}_sequence_length"]
        values = stream(0, f"{kind} lengths of a result").normal(known["avg"], known["std"], n)
        low, high = known.get("min") or 1, known.get("max") or float(np.max(values))
        drawn.append(np.maximum(1, np.rint(np.clip(values, low, high))).astype(int).tolist())
    return tuple(zip(*drawn, strict=True))


def _aiperf_model(config: Mapping[str, Any]) -> str:
    endpoint = config.get("endpoint")
    names = endpoint.get("model_names") if isinstance(endpoint, Mapping) else None
    names = names or config.get("models") or config.get("model_names")
    if isinstance(names, Mapping):
        names = names.get("items") or names.get("names")
    first = names[0] if isinstance(names, list) and names else names
    if isinstance(first, Mapping):
        first = first.get("name")
    return str(first or "")


def _aiperf_load(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the load by its names in older versions; since 0.13 it is a phase."""
    phases = [p for p in config.get("phases") or () if p.get("kind") == "profiling"]
    if not phases:
        if "loadgen" in config:
            loadgen: Mapping[str, Any] = config["loadgen"]
            return loadgen
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
                figures[f"{of}_{ours}_ms"] = factor * _amount(path, theirs, known[of])
    strategy = found["config"]["strategy"]
    kind, rate = strategy["type_"], strategy.get("rate")
    name = f"{path.name}, {kind}"
    requests = list(guidellm_requests(path, found))
    if not requests:
        raise InputError("bench", f"{name}: no request completed", "a run with completed requests")
    lengths = tuple((request.prompt, request.output) for request in requests)
    sent = len(requests) + sum(
        len(found["requests"].get(kind) or ()) for kind in ("errored", "incomplete")
    )
    backend = found["config"].get("backend") or {}
    model = str(backend.get("model") or "") if isinstance(backend, Mapping) else ""
    if rate is not None:
        arrivals = tuple(request.when_ns / 1e9 for request in requests)
        return Bench(f"{name} at {rate:g}/s", figures, {}, lengths, arrivals, model, "", sent)
    together = 1 if kind == "synchronous" else strategy.get("streams", strategy["max_concurrency"])
    load = {"request_rate": "inf", "max_concurrency": together or len(lengths)}
    return Bench(
        f"{name} of {load['max_concurrency']}", figures, load, lengths, (), model, "", sent
    )


def _lifecycle(path: Path, records: Sequence[Any]) -> Bench:
    """Read inference-perf's per_request_lifecycle_metrics.json."""
    if not records or not all(isinstance(r, Mapping) and "start_time" in r for r in records):
        problem = f"{path} does not say when requests were sent and answered"
        raise InputError("bench", problem, "inference-perf's per_request_lifecycle_metrics.json")
    times: dict[str, list[float]] = {name: [] for name in ("ttft", "tpot", "e2el")}
    lengths, arrivals, begins, ends = [], [], [], []
    for record in records:
        begins.append(_amount(path, "start_time", record["start_time"]))
        counts = ("input_tokens", "output_tokens")
        prompt, output = (_count(path, name, record["info"].get(name)) for name in counts)
        tokens = [float(at) for at in record["info"].get("output_token_times") or ()]
        if record.get("error") or not output or not tokens:
            continue
        start, end = begins[-1], _amount(path, "end_time", record["end_time"])
        lengths.append((prompt, output))
        arrivals.append(start)
        ends.append(end)
        times["ttft"].append(1e3 * (tokens[0] - start))
        times["e2el"].append(1e3 * (end - start))
        if output > 1:
            times["tpot"].append(1e3 * (tokens[-1] - tokens[0]) / (output - 1))
    if not lengths:
        raise InputError("bench", f"{path}: no request completed", "a run with completed requests")
    figures = {
        f"{of}_{name}_ms": float(found)
        for name, values in times.items()
        if values
        for of, found in zip(
            _STATISTICS, (np.mean(values), *np.percentile(values, (50, 90, 99))), strict=True
        )
    }
    lasted = max(ends) - min(begins)
    if lasted > 0:
        figures |= {"duration": lasted, "request_throughput": len(lengths) / lasted}
        figures["output_throughput"] = sum(output for _, output in lengths) / lasted
    return Bench(path.name, figures, {}, tuple(lengths), tuple(arrivals), "", "", len(records))
