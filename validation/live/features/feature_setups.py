"""What an engine's features do, live and simulated: each by a load that exercises it.

A feature's load goes to the calibrated engine, which has none of them and records the routing of
its requests, and again to an engine that has it. Both runs are simulated as ``eldr-sim run`` does,
with the calibrated tables and the routing that the first recorded; so a feature's error stands
beside that without it, and what vLLM counts of it beside what the simulation counts."""

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError, needed
from eldr_sim.kinds import Row
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.outcome.metrics import draft_counters, request_times
from eldr_sim.simulator.outcome.summary import run_figures
from eldr_sim.simulator.run import build_cluster
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.requests.arrivals import draw_arrivals
from eldr_sim.traces.requests.logs.log_columns import chain_blocks
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.live.calibration.engine_calibration import Clock, EngineCalibration
from eldr_sim.validation.live.engines.client import send_turns
from eldr_sim.validation.live.engines.load import Load, LoadRequest, make_load
from eldr_sim.validation.live.engines.servers import SERVED_NAME
from eldr_sim.validation.live.engines.setups import Endpoint
from eldr_sim.validation.live.live_run import EngineInfo, LoadInfo

FeatureLoad = Literal[
    "single prompts", "shared prefixes", "long prompts", "closed loop", "conversations",
    "steady prompts", "crowded loop",
]  # fmt: skip
#: Tokens of the system prompt that all requests of a domain share.
PREFIX = 400
#: Turns of a conversation, and the median of the time to think between them, s.
TURNS, THINK_S = 3, 1.0
#: Requests in flight, and of each slot in all: of few long prompts open arrivals seldom meet.
CLOSED: dict[FeatureLoad, tuple[int, int]] = {
    "closed loop": (8, 6), "long prompts": (3, 6), "crowded loop": (14, 3),
}  # fmt: skip
#: The steady load of equal prompts takes this many times the duration of the others.
STEADY = 3


class Lengths(NamedTuple):
    """Tokens of a load's requests, in the mean."""

    prompt: int  #: all that is computed where nothing is cached
    output: int
    own: int  #: of the prompt, less what it shares with others


def lengths_of(name: FeatureLoad, prompt_len: int, output_len: int) -> Lengths:
    """Return the lengths of a load, given those of the campaign."""
    if name == "shared prefixes":
        return Lengths(PREFIX + prompt_len, output_len // 2, prompt_len)
    if name == "long prompts":
        return Lengths(1200, output_len // 2, 1200)
    if name == "conversations":
        output = output_len // 2
        mean = prompt_len + (TURNS - 1) / 2 * (prompt_len + output)
        return Lengths(round(mean), output, prompt_len)
    return Lengths(prompt_len, output_len, prompt_len)


def feature_load(
    name: FeatureLoad,
    slices: dict[str, tuple[int, int]],
    *,
    rate: float,
    duration_s: float,
    lengths: Lengths,
    seed: int,
    repeat: int,
    prefix: str,
) -> tuple[Load, int | None]:
    """Make a load; return it and how many requests may be in flight, None for any number.
    ``slices``: of the vocabulary, by domain; ``repeat``: repeats differ in each prompt's first
    token, so that none finds another's blocks; ``prefix``: of names."""
    slots, per_slot = CLOSED.get(name, (0, 0))
    stretches = STEADY if name == "steady prompts" else 1
    n = slots * per_slot or max(8, round(rate * duration_s * stretches))
    info = LoadInfo(name=name, request_rate=1e6 if slots else rate, burstiness=1.0,
                    lengths="recorded" if name == "single prompts" else "fixed",
                    num_requests=n, seed=seed)  # fmt: skip
    own, output = lengths.own, lengths.output
    load = make_load(
        info, slices, prompt_len=own, output_len=output, prompt_range=(4, 4 * own),
        output_range=(2, 3 * output), prefix=prefix,
    )  # fmt: skip
    if name == "shared prefixes":
        load = _with_prefixes(load, slices, seed)
    elif name == "conversations":
        load = _in_turns(load, rate, seed)
    requests = tuple(
        r if r.parent >= 0 else replace(r, prompt=[slices[r.domain][0] + repeat, *r.prompt[1:]])
        for r in load.requests
    )
    return Load(load.info, requests), slots or None


def _with_prefixes(load: Load, slices: dict[str, tuple[int, int]], seed: int) -> Load:
    """Put the system prompt of its domain before each prompt."""
    shared = {
        name: stream(seed, f"live prefix:{name}").integers(*ids, size=PREFIX).tolist()
        for name, ids in slices.items()
    }
    requests = tuple(replace(r, prompt=shared[r.domain] + r.prompt) for r in load.requests)
    return Load(load.info, requests)


def _in_turns(load: Load, rate: float, seed: int) -> Load:
    """Let every so-manieth request begin a conversation, with which the next ones go on."""
    n = len(load.requests) // TURNS
    begin = draw_arrivals(rate / TURNS, 1.0, None, n, seed)
    think = stream(seed, "live thinking").lognormal(np.log(THINK_S), 0.5, size=n * TURNS)
    requests: list[LoadRequest] = []
    for i, request in enumerate(load.requests[: n * TURNS]):
        first = requests[-1] if i % TURNS else request
        requests.append(
            replace(
                request,
                domain=first.domain,
                send_s=float(begin[i // TURNS]),
                parent=i - 1 if i % TURNS else -1,
                gap_s=float(think[i]) if i % TURNS else 0.0,
            )
        )
    info = load.info.model_copy(update={"num_requests": len(requests)})
    return Load(info, tuple(requests))


#: Figures of a run: TPOT's and TTFT's median and 99th percentile, and E2E's median.
FIGURES = (("tpot", 50), ("tpot", 99), ("ttft", 50), ("ttft", 99), ("e2el", 50))
_HITS = {"prefix_cache_queries": "prefix_cache_queries", "prefix_cache_hits": "prefix_cache_hits"}
_VERIFIED = {name: name for name in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens",
                                     "spec_decode_num_accepted_tokens")}  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """A feature of an engine."""

    load: FeatureLoad  #: what exercises it
    #: Arguments of ``vllm serve``, and fields that say the same; without, the load is the feature.
    engine: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: vLLM's counters, less ``vllm:`` and ``_total``, and the figures of a result that they are.
    counters: Mapping[str, str] = field(default_factory=dict)
    drafts: Mapping[str, Any] | None = None  #: ``--speculative-config``, in place of `engine`
    #: The router's policy before two engines (`routed`), and what befalls the first of them.
    router: str | None = None
    fault: Literal["death", "freeze"] | None = None


def _drafting(**config: Any) -> Feature:
    return Feature("single prompts", counters=_VERIFIED, drafts=config)


_CACHED = {"enable_prefix_caching": True}
FEATURES: dict[str, Feature] = {
    "chunked-prefill": Feature("long prompts"),
    "closed-loop": Feature("closed loop"),
    "prefix-cache": Feature("shared prefixes", ("--enable-prefix-caching",), _CACHED, _HITS),
    "conversations": Feature("conversations", ("--enable-prefix-caching",), _CACHED, _HITS),
    "async-scheduling": Feature(
        "single prompts", ("--async-scheduling",), {"async_scheduling": True}
    ),
    "defaults": Feature("shared prefixes", ("--enable-prefix-caching", "--async-scheduling"),
                        _CACHED | {"async_scheduling": True}, _HITS),
    "preemption": Feature("crowded loop", ("--num-gpu-blocks-override", "20"),
                          {"num_gpu_blocks_override": 20}, {"num_preemptions": "preemptions"}),
    "synthetic-drafts": _drafting(
        method="draft_model", num_speculative_tokens=3, rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[0.8, 0.6, 0.3],
    ),
    "ngram": _drafting(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1,
                       prompt_lookup_max=3),
    "kv-events": Feature("shared prefixes", ("--enable-prefix-caching",), _CACHED, _HITS,
                         router="cache_aware"),
    "death": Feature("steady prompts", router="round_robin", fault="death"),
    "freeze": Feature("steady prompts", router="round_robin", fault="freeze"),
}  # fmt: skip
"""By name. ``defaults`` are vLLM's: prefix caching and asynchronous scheduling together."""


@dataclass(frozen=True)
class Sent:
    """A load that an engine has served."""

    load: Load
    requests: pa.Table  #: ``live_run.REQUESTS``, times of `time.monotonic`
    contexts: list[list[int]]  #: tokens of each prompt and, in conversations, of its answer
    counted: dict[str, float]  #: vLLM's counters, by their names less ``vllm:`` and ``_total``
    clock: Clock  #: the engine's, by its probes
    max_concurrency: int | None = None  #: of the client


def serve(
    load: Load,
    endpoint: Endpoint,
    calibrated: EngineCalibration,
    max_concurrency: int | None,
    **told: Any,
) -> Sent:
    """Send a load to an engine, and read what it counted meanwhile; ``told``: to `send_turns`."""
    before = read_metrics(endpoint.url)
    requests, contexts = send_turns(
        load, endpoint.url, model=SERVED_NAME, max_concurrency=max_concurrency, **told
    )
    counted = {name: n - before.get(name, 0.0) for name, n in read_metrics(endpoint.url).items()}
    clock = _clock(endpoint.log, requests, calibrated)
    return Sent(load, requests, contexts, counted, clock, max_concurrency)


def read_metrics(url: str) -> dict[str, float]:
    """Return an engine's or the router's counters and gauges, summed over labels but positions."""
    parser = needed("prometheus_client.parser", "live run")
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    metrics: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(text):
        if family.type in ("counter", "gauge"):
            for sample in family.samples:
                if family.type == "gauge" or sample.name.endswith("_total"):
                    name = sample.name.removeprefix("vllm:").removesuffix("_total")
                    name += f"_{sample.labels['position']}" if "position" in sample.labels else ""
                    metrics[name] = metrics.get(name, 0.0) + sample.value
    return metrics


def _clock(log: Path, requests: pa.Table, calibrated: EngineCalibration) -> Clock:
    """Return the clock of an engine while it served requests, by the probes of its worker."""
    drift = calibrated.info.drift
    if drift is None:
        return Clock(np.empty(0), np.empty(0))
    begin = float(np.min(requests["sent_s"].to_numpy()))
    end = max(times[-1] for times in requests["token_s"].to_pylist() if times)
    probes = []
    for file in log.glob("worker-*.jsonl"):
        for text in file.read_text(encoding="utf-8").splitlines():
            if '"probe"' in text and text.endswith("}"):
                line = json.loads(text)
                if begin <= line["start"] <= end and line["probe"] is not None:
                    probes.append((line["start"], line["probe"]))
    at, taken = np.array(probes, np.float64).reshape(-1, 2).T
    return Clock(at, calibrated.drift(at, taken).factor(at) ** drift.step)


class Replay(NamedTuple):
    """The simulation of a load that engines have served."""

    record: RunRecord
    figures: dict[str, Any]  #: those of `outcome.metrics`
    #: ``ttft``, ``tpot`` and ``e2el`` as a client sees them, s, by request of the load; and the
    #: rows of the record, whose times are the wall's since the first request, that these are.
    times: dict[str, Floats]
    rows: NDArray[np.intp]


def simulate_sent(sent: Sent, fields: Mapping[str, Any], **about: Any) -> tuple[Row, Row]:
    """Return `figures` and counts of `replay`; raises InputError if a request does not complete."""
    again = replay(sent, fields, **about)
    if not again.record.completed.all():
        raise InputError("features", "the simulation does not complete all requests")
    return figures(again.times), again.figures | draft_counters(again.record)


def replay(
    sent: Sent,
    fields: Mapping[str, Any],
    *,
    engine: EngineInfo,
    calibration: Path,
    calibrated: EngineCalibration,
    model: str,
    max_model_len: int,
    trace: Path,
    seed: int = 0,
) -> Replay:
    """Simulate a load that engines have served. ``fields``: of the run, beyond the calibrated
    engine; ``calibration``: its folder; ``trace``: routing, request ``i`` that of the load's
    request ``i``."""
    config = make_config(
        {"frontend": "none", "topology": "1C", "policy": "round_robin", "model": model,
         "trace": str(trace),
         "gpu": str(calibration), "tables": str(calibration / "tables"),
         "max_model_len": max_model_len, "max_num_seqs": engine.max_num_seqs,
         "max_num_batched_tokens": engine.max_num_batched_tokens, "seed": seed,
         "block_size": engine.block_size, "num_gpu_blocks_override": engine.n_blocks,
         "enable_prefix_caching": False, "async_scheduling": False, "request_rate": "inf",
         "num_requests": len(sent.contexts)}
        | dict(fields)
    )  # fmt: skip
    info = calibrated.info
    prompt_len = sent.requests["prompt_len"].to_numpy()
    ingress = np.asarray(info.ingress_s.of(prompt_len), np.float64)
    workload, order = _workload(sent, engine.block_size, ingress, info.egress_s)
    prepared = prepare(config)
    record = build_cluster(config, prepared, workload, (0.0, np.inf)).run()
    first = float(np.min(sent.requests["sent_s"].to_numpy()))
    begin = float(sent.clock.own_s(np.array([first]))[0])
    for moment in ("sent_s", "first_token_s", "finish_s"):
        record.requests[moment] = sent.clock.wall_s(begin + record.requests[moment]) - first
    # Rows of a record are in the order of arrival, which ends decide where requests follow others.
    times, rows = request_times(record), np.argsort(order[record.numbers])
    found = {name: times[name][rows] for name in ("ttft", "tpot", "e2el")}
    found["ttft"] += ingress + info.egress_s
    found["e2el"] += ingress + info.egress_s
    counted = run_figures(record, config, prepared.model.n_moe_layers)
    return Replay(record, counted, found, rows)


def _workload(
    sent: Sent, block_size: int, ingress: Floats, egress_s: float
) -> tuple[Workload, NDArray[np.intp]]:
    """Return the requests as the engine's queue got them, and which row of the load each is.
    Prompts, and answers that others go on with, share the blocks whose tokens are equal."""
    requests, load = sent.requests, sent.load.requests
    first = float(np.min(requests["sent_s"].to_numpy()))
    arrival = sent.clock.own_s(requests["sent_s"].to_numpy() + ingress)
    arrival -= float(sent.clock.own_s(np.array([first]))[0])
    order = np.argsort(arrival, kind="stable")
    place = np.argsort(order)
    blocks, indptr = [], [0]
    for row in order.tolist():
        tokens = sent.contexts[row]
        pieces = range(0, len(tokens) - block_size + 1, block_size)
        # A block's number stands for its tokens; `chain_blocks` adds what comes before.
        blocks += [hash(tuple(tokens[i : i + block_size])) % (1 << 63) for i in pieces]
        indptr.append(len(blocks))
    before = _gone_before(sent)
    parent = np.where(before >= 0, place[before], -1)[order]
    gaps = np.array([load[i].gap_s + egress_s + ingress[i] for i in order]) / sent.clock.mean
    turns, chained = any(r.parent >= 0 for r in load), bool((parent >= 0).any())
    rows = order.astype(np.int32)
    domains = {name: i for i, name in enumerate(sorted({r.domain for r in load}))}
    lengths = (requests[name].to_numpy()[order] for name in ("prompt_len", "output_len"))
    workload = Workload.plain(
        arrival[order],
        lengths,
        rows,
        domain=np.array([domains[load[i].domain] for i in order], np.int16),
        session=rows,
        prefix_hash=chain_blocks(np.array(blocks, np.uint64), np.array(indptr)),
        prefix_indptr=np.array(indptr, np.int64),
        prefix_text=np.repeat(rows, np.diff(indptr)),
        prefix_block_tokens=block_size if blocks else 0,
        parent=parent.astype(np.int32) if chained else None,
        gap_s=gaps if chained else None,
        answered=np.full(len(rows), True) if turns else None,
    )
    return workload, order


def _gone_before(sent: Sent) -> NDArray[np.intp]:
    """Return the request, or -1, whose end lets each be sent: the turn before, or a seat's last. A
    client with so many seats sends the next request when one comes free, and gets to the engine
    when it has begun another step: had the simulation's seats no way between, it would not."""
    before = np.array([request.parent for request in sent.load.requests])
    max_concurrency = sent.max_concurrency
    if max_concurrency is not None:
        ended = np.argsort([times[-1] for times in sent.requests["token_s"].to_pylist()])
        order = np.argsort(sent.requests["sent_s"].to_numpy(), kind="stable")
        before[order[max_concurrency:]] = ended[: max(0, len(order) - max_concurrency)]
    return before


def live_figures(sent: Sent) -> Row:
    """Return the figures of a load as its client saw it."""
    return figures(live_times(sent.requests))


def live_times(requests: pa.Table) -> dict[str, Floats]:
    """Return ``ttft``, ``tpot`` and ``e2el`` of requests that got tokens, s."""
    sent_s = requests["sent_s"].to_numpy()
    tokens = requests["token_s"].to_pylist()
    first, last = (np.array([times[i] for times in tokens]) for i in (0, -1))
    gaps = np.array([max(len(times) - 1, 1) for times in tokens])
    tpot = np.where([len(times) > 1 for times in tokens], (last - first) / gaps, np.nan)
    return {"ttft": first - sent_s, "tpot": tpot, "e2el": last - sent_s}


def figures(times: Mapping[str, Floats]) -> Row:
    """Return TPOT's and TTFT's median and p99, and E2E's median, ms, of ``times`` by request, s."""
    return {f"{name} p{q}": 1e3 * float(np.nanpercentile(times[name], q)) for name, q in FIGURES}
