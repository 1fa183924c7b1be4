"""Calibration of a running set-up: separate loads, and what their logs say."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eldr_sim.kernel_profiles.kernels.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.profile.links import measure_transfers, nixl_version
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.validation.live.calibration import engine_calibration
from eldr_sim.validation.live.calibration.calibrate import (
    Burst,
    calibration_bursts,
    doubts,
    engine_tables,
    outside_times,
    quality,
)
from eldr_sim.validation.live.engine_log import EngineLog, read_complete_log
from eldr_sim.validation.live.engines.client import join_proxy_log, prefill_ahead, send_load
from eldr_sim.validation.live.engines.load import Domain, Load, LoadRequest, make_load
from eldr_sim.validation.live.engines.plugin import FORCED_PREFIX
from eldr_sim.validation.live.engines.run_writer import machine, versions, write_trace_of
from eldr_sim.validation.live.engines.servers import SERVED_NAME, EngineOptions
from eldr_sim.validation.live.engines.setups import Setup, start_proxy
from eldr_sim.validation.live.live_run import EngineInfo, LoadInfo

_KV_GRID = tuple(
    (descriptors * size, descriptors)
    for descriptors in (1, 16, 128, 512)
    for size in (4 << 10, 16 << 10, 64 << 10)
)
"""(bytes, descriptors) of the timed transfers: KV blocks of a small model."""

_UNLOADED_PROMPTS = (16, 64, 128, 256)
_UNLOADED_ROUNDS = 4
_UNLOADED_OUTPUT = 6
_FIT_REQUESTS = 96  # calibration requests for ELDR
_FIT_OUTPUT = 24


def calibrate(
    out: Path,
    setup: Setup,
    options: EngineOptions,
    config: dict[str, Any],
    progress: Callable[[float], None],
    fitted: Load | None,
    seed: int,
) -> None:
    """Measure the tables and delays of a set-up and write its calibration folder. ``fitted``:
    requests of ELDR's offline fit (`load_of_fit`), if any; ``seed``: of prompts and of the bursts'
    order."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    dims, measured = engine_calibration.model_of(config), setup.decode[-1]
    engine = read_complete_log(measured.log, {}).engine
    bursts = calibration_bursts(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.max_model_len,
        engine["block_size"] * engine["n_blocks"],
        engine["block_size"],
        seed,
    )
    rng = np.random.default_rng(seed)
    computed = _send_bursts(
        bursts, setup, out / "bursts.jsonl", dims.vocab_size, rng,
        lambda share: progress(0.8 * share),
    )  # fmt: skip
    tables, drift = engine_tables(
        _of(read_complete_log(measured.log, computed), FORCED_PREFIX),
        dims,
        machine().get("gpu", machine()["processor"]),
        f"vllm {versions().get('vllm', 'of unknown version')}",
        versions(),
    )
    sent = _send_alone(out, setup, options, dims, rng, lambda share: progress(0.8 + 0.1 * share))
    info = outside_times(
        sent,
        read_logs(setup, sent),
        [e.name for e in setup.prefill],
        setup.prefilled,
        dims,
        lambda: _measure_link("cuda" if setup.client_core is None else "cpu"),
    )
    if fitted is not None:
        _fit_artifact(out, setup, options.model, fitted, seed)
    progress(1.0)
    found = quality(tables)
    about = {"drift": drift, "doubts": doubts(found), "seconds": time.monotonic() - began}
    info = info.model_copy(update=about | {"notes": info.notes | {"tables": found}})
    engine_calibration.write_calibration(out, info, tables)
    own = engine_infos(setup, {e.name: read_complete_log(e.log, {}) for e in setup.endpoints})[-1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = engine_calibration.device_of(tables[0].metadata.gpu, own, memory)
    (out / "gpu.json").write_text(device.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _send_bursts(
    bursts: Sequence[Burst],
    setup: Setup,
    log: Path,
    vocab_size: int,
    rng: np.random.Generator,
    progress: Callable[[float], None],
) -> dict[str, int]:
    """Send bursts; return the tokens that the last engine computes of each of its requests. Several
    decode engines get each burst at the same time and through the proxy, as they work in a run:
    they share a memory bus, and cores with each other, the proxy and the client."""
    decode, parts = len(setup.decode), []
    with start_proxy(replace(setup, endpoints=tuple(setup.decode)), "round_robin", log) as url:
        for done, burst in enumerate(bursts):
            size = (burst.requests * decode, burst.prompt_len)
            prompts = rng.integers(4, vocab_size, size=size).tolist()
            requests = [
                LoadRequest(f"{burst.name}-{i}", "", prompt, burst.output_len, 0.0)
                for i, prompt in enumerate(prompts)
            ]
            parts.append(send_at_once(requests, url))
            progress(done / len(bursts))
    sent = pa.concat_tables(parts)
    return _computed(join_proxy_log(sent, log) if decode > 1 else sent, decode - 1)


def _send_alone(
    out: Path,
    setup: Setup,
    options: EngineOptions,
    dims: ModelDims,
    rng: np.random.Generator,
    progress: Callable[[float], None],
) -> pa.Table:
    """Send single requests the way of all requests."""
    proxy_log = out / "proxy.jsonl"
    lengths = [n for n in _UNLOADED_PROMPTS if n <= options.max_num_batched_tokens]
    lengths *= _UNLOADED_ROUNDS * len(setup.decode)
    with start_proxy(setup, "round_robin", proxy_log) as url:
        parts = []
        for i, n in enumerate(lengths):
            tokens = rng.integers(4, dims.vocab_size, size=n).tolist()
            alone = LoadRequest(f"unloaded-{i}", "", tokens, _UNLOADED_OUTPUT, 0.0)
            ahead = setup.prefill[0].url if setup.prefilled else None
            parts.append(send_at_once([alone], url, ahead))
            progress(i / len(lengths))
    sent = pa.concat_tables(parts)
    return join_proxy_log(sent, proxy_log) if len(setup.endpoints) > 1 else sent


def _measure_link(device: str) -> tuple[dict[tuple[int, int], float], str]:
    """Time NIXL between two agents of this machine, by (bytes, descriptors)."""
    seconds = {point: t.median_s for point, t in measure_transfers(device, _KV_GRID)[0].items()}
    return seconds, f"measured: NIXL {nixl_version()} between two agents"


def load_of_fit(domains: Mapping[str, Domain], prompt_len: int, seed: int) -> Load:
    """Return the requests of ELDR's offline fit, equally many of each domain in the mean."""
    return make_load(
        _at_once("fit", _FIT_REQUESTS, seed),
        domains,
        prompt_len=prompt_len,
        output_len=_FIT_OUTPUT,
        prompt_range=(prompt_len, prompt_len),
        output_range=(_FIT_OUTPUT, _FIT_OUTPUT),
        prefix="fit",
    )


def _fit_artifact(out: Path, setup: Setup, model: str, load: Load, seed: int) -> None:
    """Record calibration requests and make ELDR's offline fit."""
    engine = setup.decode[-1]
    requests = send_load(load, engine.url, model=SERVED_NAME)
    read_complete_log(engine.log, _computed(requests))
    write_trace_of(out / "trace", requests, [engine], model, "calibration")
    fit(calibrated_requests(open_trace(out / "trace")), len(setup.decode), seed).save(
        out / "artifact.npz"
    )


def calibrated_requests(trace: RoutingTrace) -> CalibrationSet:
    """Return the requests that ELDR's offline fit rests on, equally many of each domain."""
    mix = dict.fromkeys(trace.domains, 1 / len(trace.domains))
    return calibration_set(trace, workload="task", domain_mix=mix)


def capacity(
    setup: Setup,
    options: EngineOptions,
    dims: ModelDims,
    calibrated: engine_calibration.EngineCalibration,
    prompt_len: int,
    output_len: int,
) -> float:
    """Return the requests/s that a set-up carries at full batches, by its tables: its share of full
    decode batches under uniform routing, and its prompt; pools work in parallel."""
    batch = options.max_num_seqs
    engine = engine_infos(setup, read_logs(setup))[-1]
    step = calibrated.step_time(dims, engine, options.max_model_len)
    distinct = [float(uniform_distinct(batch, dims.n_experts, dims.top_k))] * dims.n_moe_layers
    decode_s = output_len * step.decode_s(distinct, batch, prompt_len + output_len / 2) / batch
    prefill_s = step.prompt_s(prompt_len)
    if setup.prefilled:
        return len(setup.decode) / decode_s
    if not setup.prefill:
        return len(setup.decode) / (decode_s + prefill_s)
    return min(len(setup.decode) / decode_s, len(setup.prefill) / prefill_s)


def read_logs(setup: Setup, requests: pa.Table | None = None) -> dict[str, EngineLog]:
    """Read each engine's log, once it holds the last tokens of ``requests`` (`REQUESTS`)."""
    logs = {}
    for endpoint in setup.endpoints:
        computed: dict[str, int] = {}
        if requests is not None and endpoint.role == "prefill":
            lengths = requests["prompt_len"].to_pylist()
            computed = dict(zip(requests["request_id"].to_pylist(), lengths, strict=True))
        elif requests is not None:
            computed = _computed(requests, setup.decode.index(endpoint))
        logs[endpoint.name] = read_complete_log(endpoint.log, computed)
    return logs


def _computed(requests: pa.Table, engine: int = 0) -> dict[str, int]:
    """Return the tokens that a decode engine has computed of each of its requests."""
    return {
        row["request_id"]: row["prompt_len"] + row["output_len"] - 1
        for row in requests.select(["request_id", "prompt_len", "output_len", "engine"]).to_pylist()
        if row["engine"] == engine
    }


def engine_infos(setup: Setup, logs: Mapping[str, EngineLog]) -> list[EngineInfo]:
    """Return descriptions of the running engines, prefill first."""
    found = []
    for endpoint in setup.endpoints:
        engine = logs[endpoint.name].engine
        known = {name: engine[name] for name in EngineInfo.model_fields if name in engine}
        found.append(EngineInfo(name=endpoint.name, role=endpoint.role, **known))
    return found


def send_at_once(requests: list[LoadRequest], url: str, ahead: str | None = None) -> pa.Table:
    """Send requests together and wait for their tokens; ``ahead`` computes their prompts first."""
    load = Load(_at_once("calibration", len(requests), 0), tuple(requests))
    if ahead is not None:
        load = prefill_ahead(load, ahead, model=SERVED_NAME)
    return send_load(load, url, model=SERVED_NAME)


def _at_once(name: str, n: int, seed: int) -> LoadInfo:
    """Describe requests whose arrivals nobody asks for."""
    return LoadInfo(name=name, request_rate=1e6, burstiness=1.0, lengths="fixed",
                    num_requests=n, seed=seed)  # fmt: skip


def _of(log: EngineLog, prefix: str) -> EngineLog:
    """Return the steps of the log in which all request names contain a text."""
    steps = [s for s in log.steps if all(prefix in name for name, _, _ in s.rows)]
    return EngineLog(log.engine, log.received_s, steps, log.pulled_s)
