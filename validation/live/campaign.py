"""Campaign of live runs: each set-up is started, calibrated, loaded and recorded."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.profile.nixl_transfer import measure_transfers, nixl_version
from eldr_sim.policies.artifact import fit
from eldr_sim.traces.calibration import calibration_set
from eldr_sim.traces.format import open_trace
from eldr_sim.validation.live.calibrate import (
    calibration_bursts,
    engine_tables,
    outside_times,
)
from eldr_sim.validation.live.client import prefill_ahead, send_load
from eldr_sim.validation.live.engine_calibration import (
    EngineCalibration,
    model_of,
    read_calibration,
    write_calibration,
)
from eldr_sim.validation.live.engine_log import EngineLog, read_engine_log
from eldr_sim.validation.live.http import import_aiohttp
from eldr_sim.validation.live.live_run import EngineInfo, LoadInfo, RunInfo
from eldr_sim.validation.live.load import Load, LoadRequest, make_load
from eldr_sim.validation.live.plugin import FORCED_PREFIX
from eldr_sim.validation.live.proxy_log import join_proxy_log
from eldr_sim.validation.live.random_model import domain_slices, write_model
from eldr_sim.validation.live.run_writer import assemble_run, machine, versions, write_trace_of
from eldr_sim.validation.live.servers import EngineOptions, require_vllm
from eldr_sim.validation.live.setups import (
    SETUPS,
    Setup,
    existing_setup,
    start_proxy,
    started_setup,
)

__all__ = ["LOADS", "SHORTEST_FIRST", "Campaign", "LoadShape", "record_campaign", "record_setup"]

MODEL_NAME = "model"

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


@dataclass(frozen=True)
class LoadShape:
    """A load relative to the capacity of the set-up.

    Attributes
    ----------
    share
        Share of the calibrated capacity; above 1 queues grow.
    lengths, burstiness, queue_order
        As in ``LoadInfo``.
    """

    share: float
    lengths: Literal["fixed", "recorded"]
    burstiness: float
    queue_order: Literal["fcfs", "sjf"] = "fcfs"

    @property
    def name(self) -> str:
        """Name of the load."""
        arrivals = "Poisson" if self.burstiness == 1 else "bursty"
        order = "" if self.queue_order == "fcfs" else f", {self.queue_order}"
        return f"{100 * self.share:.0f}%, {self.lengths} lengths, {arrivals}{order}"


#: From light load to overload. Set-ups with several decode engines, which compare policies, get the
#: second load only.
LOADS = (
    LoadShape(0.4, "fixed", 1.0),
    LoadShape(0.6, "recorded", 1.0),
    LoadShape(0.8, "recorded", 0.3),
    LoadShape(1.2, "fixed", 1.0),
)
#: The same with the shortest waiting prompt first, for engines that schedule by priority.
SHORTEST_FIRST = tuple(replace(shape, queue_order="sjf") for shape in LOADS)


@dataclass(frozen=True)
class Campaign:
    """Plan of a campaign.

    Attributes
    ----------
    out
        Folder of the campaign.
    options
        The engines' model and size.
    loads, policies, repeats
        Loads and policies of each set-up, and repeats of each.
    duration_s
        Time over which the requests of a load arrive, s.
    prompt_len, output_len
        Fixed lengths, or means of recorded lengths, tokens.
    seed
        Seed of the loads.
    """

    out: Path
    options: EngineOptions
    loads: tuple[LoadShape, ...] = LOADS
    policies: tuple[str, ...] = ("round_robin",)
    repeats: int = 3
    duration_s: float = 45.0
    prompt_len: int = 64
    output_len: int = 96
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The served model's ``config.json``."""
        path = Path(self.options.model) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("model", f"{path}: {error}", "a folder with a config.json") from None
        return dict(config)

    def calibration(self, setup: str) -> Path:
        """Folder of a set-up's calibration."""
        return self.out / "calibration" / setup


def record_campaign(
    campaign: Campaign,
    setups: Sequence[str],
    progress: Callable[[str, float], None],
    prefill: Sequence[tuple[str, Path]] = (),
    decode: Sequence[tuple[str, Path]] = (),
) -> list[Path]:
    """Record set-ups in turn; runs already in the campaign's folder are kept.

    Parameters
    ----------
    campaign
        The plan.
    setups
        Names in :data:`~.setups.SETUPS` to start.
    progress
        Called with the current task and the share of it that is done.
    prefill, decode
        URL and log folder of running engines; they are then the only set-up.

    Returns
    -------
    list of Path
        The folders of the recorded runs.

    Raises
    ------
    InputError
        If the folder holds another campaign, or an engine, the proxy or a request fails.
    """
    import_aiohttp()
    if not decode:
        require_vllm()
    elif not all(log.is_dir() for _, log in (*prefill, *decode)):
        raise InputError("decode_url", "a log folder is not there", "ELDR_SIM_TIMING of the engine")
    model = Path(campaign.options.model)
    if decode and model == campaign.out / "model":
        raise InputError("model", "missing: these engines need --model", "--model DIR")
    campaign.out.mkdir(parents=True, exist_ok=True)
    if model == campaign.out / "model" and not model.exists():
        progress("making the model", 0.0)
        write_model(model, campaign.seed)
    _check_same(campaign)
    folders: list[Path] = []
    if decode:
        setup = existing_setup(campaign.out / "logs", prefill, decode)
        return record_setup(campaign, setup, progress)
    gpu = "gpu" in machine()
    for name in setups:
        n_decode = sum(role != "prefill" for _, role in SETUPS[name])
        planned = [out for out, *_ in _planned(campaign, name, n_decode)]
        if all(out.exists() for out in planned):
            folders += planned
            continue
        log = campaign.out / "logs" / f"{name}-{time.time_ns():x}"
        progress(f"{name}: starting vLLM", 0.0)
        with started_setup(name, campaign.options, log, gpu=gpu) as setup:
            folders += record_setup(campaign, setup, progress)
    return folders


def _check_same(campaign: Campaign) -> None:
    """Write the plan into the campaign's folder; refuse a folder of another campaign."""
    about = asdict(campaign) | {"out": ""}
    text = json.dumps(about, indent=2, default=str) + "\n"
    file = campaign.out / "campaign.json"
    if not file.exists():
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        raise InputError(
            "out",
            f"{file} is of a campaign with other options",
            "a new folder, or the same options",
        )


def record_setup(
    campaign: Campaign, setup: Setup, progress: Callable[[str, float], None]
) -> list[Path]:
    """Calibrate a running set-up, then record every load, policy and repeat.

    Parameters
    ----------
    campaign
        The plan.
    setup
        The engines.
    progress
        Called with the current task and the share of it that is done.

    Returns
    -------
    list of Path
        The folders of the recorded runs; existing ones are left unchanged.

    Raises
    ------
    InputError
        If an engine, the proxy or a request fails.
    """
    with _on_core(setup.client_core):
        for endpoint in setup.endpoints:  # an engine describes itself when it gets a request
            hello = LoadRequest(f"hello-{time.time_ns():x}", "", [4, 5, 6, 7], 2, 0.0)
            _send([hello], endpoint.url)
        if not (campaign.calibration(setup.name) / "calibration.json").exists():
            calibrate(campaign, setup, lambda share: progress(f"{setup.name}: calibration", share))
        calibrated = read_calibration(campaign.calibration(setup.name))
        rate = capacity(campaign, setup, calibrated)
        planned = _planned(campaign, setup.name, len(setup.decode))
        for out, number, policy, repeat in planned:
            if not out.exists():
                shape = campaign.loads[number]
                info = _begun(campaign, setup, number) or _load_info(campaign, shape, rate)
                what = f"{setup.name} {policy}: {shape.name} #{repeat}"
                _record(campaign, setup, policy, info, repeat, out, what, progress)
        return [out for out, *_ in planned]


def _planned(campaign: Campaign, setup: str, n_decode: int) -> list[tuple[Path, int, str, int]]:
    """Return folder, load number, policy and repeat of all runs of a set-up."""
    several = n_decode > 1
    numbers = range(len(campaign.loads))[1:2] if several else range(len(campaign.loads))
    return [
        (campaign.out / "runs" / f"{setup}-{policy}-{number}-{repeat}", number, policy, repeat)
        for number in numbers
        for policy in (campaign.policies if several else ("round_robin",))
        for repeat in range(campaign.repeats)
    ]


def calibrate(campaign: Campaign, setup: Setup, progress: Callable[[float], None]) -> None:
    """Measure the tables and delays of a set-up and write its calibration folder."""
    began = time.monotonic()
    out = campaign.calibration(setup.name)
    out.mkdir(parents=True, exist_ok=True)
    options, dims = campaign.options, model_of(campaign.config)
    measured = setup.decode[-1]
    bursts = calibration_bursts(
        options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len
    )
    rng = np.random.default_rng(campaign.seed)
    for done, burst in enumerate(bursts):
        prompts = rng.integers(4, dims.vocab_size, size=(burst.requests, burst.prompt_len))
        _send(
            [
                LoadRequest(f"{burst.name}-{i}", "", prompt.tolist(), burst.output_len, 0.0)
                for i, prompt in enumerate(prompts)
            ],
            measured.url,
        )
        progress(0.8 * done / len(bursts))
    tables = engine_tables(
        _of(read_engine_log(measured.log), FORCED_PREFIX),
        dims,
        machine().get("gpu", machine()["processor"]),
        f"vllm {versions().get('vllm', 'of unknown version')}",
        versions(),
    )
    proxy_log = out / "proxy.jsonl"
    lengths = [n for n in _UNLOADED_PROMPTS if n <= options.max_num_batched_tokens]
    with start_proxy(setup, "round_robin", proxy_log) as url:
        parts = []
        for i, n in enumerate(lengths * (_UNLOADED_ROUNDS * len(setup.decode))):
            tokens = rng.integers(4, dims.vocab_size, size=n).tolist()
            alone = LoadRequest(f"unloaded-{i}", "", tokens, _UNLOADED_OUTPUT, 0.0)
            parts.append(_send([alone], url, setup.prefill[0].url if setup.prefilled else None))
            progress(0.8 + 0.1 * i / (len(lengths) * _UNLOADED_ROUNDS * len(setup.decode)))
        requests = pa.concat_tables(parts)
    if setup.prefill:
        requests = join_proxy_log(requests, proxy_log)
    info = outside_times(
        requests,
        _read_logs(setup),
        [e.name for e in setup.prefill],
        setup.prefilled,
        dims,
        lambda: _measure_link("cuda" if setup.client_core is None else "cpu"),
    )
    if "eldr" in campaign.policies and len(setup.decode) > 1:
        _fit_artifact(campaign, setup, out)
    progress(1.0)
    info = info.model_copy(update={"seconds": time.monotonic() - began})
    write_calibration(out, info, tables)


def _measure_link(device: str) -> tuple[dict[tuple[int, int], float], str]:
    """Time NIXL between two agents of this machine, by (bytes, descriptors)."""
    times, _ = measure_transfers(device, _KV_GRID)
    seconds = {point: timing.median_s for point, timing in times.items()}
    return seconds, f"measured: NIXL {nixl_version()} between two agents"


def _fit_artifact(campaign: Campaign, setup: Setup, out: Path) -> None:
    """Record calibration requests and make ELDR's offline fit."""
    slices = domain_slices(model_of(campaign.config).vocab_size)
    info = LoadInfo(
        name="fit",
        request_rate=1e6,
        burstiness=1.0,
        lengths="fixed",
        num_requests=_FIT_REQUESTS,
        seed=campaign.seed + 1,
    )
    n = campaign.prompt_len
    load = make_load(
        info,
        slices,
        prompt_len=n,
        output_len=_FIT_OUTPUT,
        prompt_range=(n, n),
        output_range=(_FIT_OUTPUT, _FIT_OUTPUT),
        prefix="fit",
    )
    engine = setup.decode[-1]
    requests = send_load(load, engine.url, model=MODEL_NAME)
    write_trace_of(out / "trace", requests, [engine], campaign.options.model, "calibration")
    mix = dict.fromkeys(slices, 1 / len(slices))
    requests_of_fit = calibration_set(open_trace(out / "trace"), workload="task", domain_mix=mix)
    fit(requests_of_fit, len(setup.decode), campaign.seed).save(out / "artifact.npz")


def capacity(campaign: Campaign, setup: Setup, calibrated: EngineCalibration) -> float:
    """Return the requests per second that a set-up carries at full batches.

    By its tables: a request takes its share of full decode batches with uniform routing, and the
    time of its prompt. Prefill and decode engines work in parallel.
    """
    options, dims = campaign.options, model_of(campaign.config)
    batch, prompt, output = options.max_num_seqs, campaign.prompt_len, campaign.output_len
    engine = _engine_infos(setup, _read_logs(setup))[-1]
    step = calibrated.step_time(dims, engine, options.max_model_len)
    distinct = [float(uniform_distinct(batch, dims.n_experts, dims.top_k))] * dims.n_moe_layers
    decode_s = output * step.decode_s(distinct, batch, prompt + output / 2) / batch
    prefill_s = step.prompt_s(prompt)
    if setup.prefilled:
        return len(setup.decode) / decode_s
    if not setup.prefill:
        return len(setup.decode) / (decode_s + prefill_s)
    return min(len(setup.decode) / decode_s, len(setup.prefill) / prefill_s)


def _begun(campaign: Campaign, setup: Setup, number: int) -> LoadInfo | None:
    """Return the load of runs recorded earlier, so that its rate stays the same."""
    for file in sorted((campaign.out / "runs").glob(f"{setup.name}-*-{number}-*/run.json")):
        return RunInfo.model_validate_json(file.read_text(encoding="utf-8")).load
    return None


def _load_info(campaign: Campaign, shape: LoadShape, capacity: float) -> LoadInfo:
    rate = shape.share * capacity
    return LoadInfo(
        name=shape.name,
        request_rate=round(rate, 4),
        burstiness=shape.burstiness,
        lengths=shape.lengths,
        queue_order=shape.queue_order,
        num_requests=max(8, math.ceil(rate * campaign.duration_s)),
        seed=campaign.seed,
    )


def _record(
    campaign: Campaign,
    setup: Setup,
    policy: str,
    info: LoadInfo,
    repeat: int,
    out: Path,
    what: str,
    progress: Callable[[str, float], None],
) -> None:
    """Send one load and write its recorded run."""
    out.parent.mkdir(parents=True, exist_ok=True)
    options = campaign.options
    most_output = options.max_model_len - campaign.prompt_len
    load = make_load(
        info,
        domain_slices(model_of(campaign.config).vocab_size),
        prompt_len=campaign.prompt_len,
        output_len=campaign.output_len,
        prompt_range=(4, min(4 * campaign.prompt_len, options.max_num_batched_tokens)),
        output_range=(2, min(3 * campaign.output_len, most_output)),
        # An engine keeps one log, so names must differ from those of an earlier, failed attempt.
        prefix=f"{out.name}-{time.time_ns():x}",
    )
    log = setup.folder / f"{out.name}.jsonl"
    fitted = campaign.calibration(setup.name) / "artifact.npz"
    artifact = fitted if policy == "eldr" else None
    with start_proxy(setup, policy, log, artifact, campaign.seed) as url:
        if setup.prefilled:
            load = prefill_ahead(load, setup.prefill[0].url, model=MODEL_NAME)
        requests = send_load(
            load, url, model=MODEL_NAME, progress=lambda share: progress(what, share)
        )
    setup.check_alive()
    if len(setup.endpoints) > 1:
        requests = join_proxy_log(requests, log)
    logs = _read_logs(setup)
    part = setup.decode if setup.prefilled else setup.endpoints
    run = RunInfo(
        setup=setup.name,
        policy=policy,
        repeat=repeat,
        load=info,
        engines=_engine_infos(setup, logs),
        prefilled=setup.prefilled,
        model=campaign.config,
        max_model_len=options.max_model_len,
        versions=versions(),
        machine=machine(),
    )
    steps_of = {endpoint.name: logs[endpoint.name] for endpoint in part}
    assemble_run(out, run, requests, steps_of, setup.endpoints, options.model)


def _read_logs(setup: Setup) -> dict[str, EngineLog]:
    return {endpoint.name: read_engine_log(endpoint.log) for endpoint in setup.endpoints}


def _engine_infos(setup: Setup, logs: Mapping[str, EngineLog]) -> list[EngineInfo]:
    """Return descriptions of the running engines, prefill first."""
    found = []
    for endpoint in setup.endpoints:
        engine = logs[endpoint.name].engine
        known = {name: engine[name] for name in EngineInfo.model_fields if name in engine}
        found.append(EngineInfo(name=endpoint.name, role=endpoint.role, **known))
    return found


def _send(requests: list[LoadRequest], url: str, ahead: str | None = None) -> pa.Table:
    info = LoadInfo(
        name="calibration",
        request_rate=1.0,
        burstiness=1.0,
        lengths="fixed",
        num_requests=len(requests),
        seed=0,
    )
    load = Load(info, tuple(requests))
    if ahead is not None:
        load = prefill_ahead(load, ahead, model=MODEL_NAME)
    return send_load(load, url, model=MODEL_NAME)


def _of(log: EngineLog, prefix: str) -> EngineLog:
    """Return the steps of the log in which all request names contain a text."""
    steps = [s for s in log.steps if all(prefix in name for name, _, _ in s.rows)]
    return EngineLog(log.engine, log.received_s, steps, log.pulled_s)


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Pin the client to a core, away from the threads that it measures."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
