"""From a configuration to a result: the steps of one run, in order."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.step_time import StepTimeModel, build_step_time_model
from eldr_sim.kernel_profiles.tables import LatencyTable, load_table, weakest
from eldr_sim.policies.artifact import RoutingArtifact
from eldr_sim.policies.base import DecodePolicy, PolicyContext
from eldr_sim.policies.choice import SignatureParameters
from eldr_sim.policies.clustering import Method
from eldr_sim.policies.fit_cache import cached_fit
from eldr_sim.policies.placement import ExpertGroup, LinearPlacement
from eldr_sim.policies.queue_order import Waiting
from eldr_sim.policies.registry import (
    decode_policy,
    placement_policy,
    prefill_policy,
    queue_order,
)
from eldr_sim.policies.signature import LayerMask, Transform, score_of
from eldr_sim.simulator.catalogue import HEADLINE, label
from eldr_sim.simulator.cluster import Cluster, ClusterSpec, EngineSpec, RunRecord
from eldr_sim.simulator.config import Pool, RunConfig
from eldr_sim.simulator.headline import Headline, Shown, number
from eldr_sim.simulator.memory import kv_blocks
from eldr_sim.simulator.metrics import summarise
from eldr_sim.simulator.replay import (
    fit_trace,
    prompt_rows,
    rank_masks,
)
from eldr_sim.simulator.shared_replay import replay_of
from eldr_sim.simulator.tables import requests_table, steps_table
from eldr_sim.simulator.trace_use import copies_met, trace_warnings
from eldr_sim.simulator.transfer import PRESETS, pull_between
from eldr_sim.traces.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.format import RoutingTrace, open_trace
from eldr_sim.traces.gate_scores import PromptScore
from eldr_sim.traces.prompts import PromptSignatures
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload, make_workload

#: Arrivals go on for this many measured windows after the warm-up, so that the requests measured
#: last still see the load; the run stops when they have ended.
_WINDOWS_OF_ARRIVALS = 2.0
#: A run gives up when the measured requests have not ended after so many times its length.
_TIME_LIMIT_FACTOR = 20.0


@dataclass(frozen=True)
class Setting:
    """Everything that a run reads, loaded and checked."""

    model: ModelDims
    trace: RoutingTrace
    spec: ClusterSpec

    @property
    def step_time(self) -> StepTimeModel:
        """Step times of a decode worker."""
        return self.spec.decode.step_time


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """What a run leaves behind: ``summary.json``, two tables and ``config.json``.

    Attributes
    ----------
    summary, config
        What the files of these names hold.
    record
        What happened.
    domains, n_moe_layers
        Names of the workload's domains; MoE layers of the model.
    """

    summary: dict[str, Any]
    config: dict[str, Any]
    record: RunRecord
    domains: list[str]
    n_moe_layers: int

    def headline(self) -> Headline:
        """Return a few figures of the run."""
        s = self.summary
        title = f"{s['policy']} on {s['topology']}: {s['model_id']} on {s['gpu']}"
        tags = ("completed", "failed", *HEADLINE)
        return Headline(title, ("figure", "value"), [(label(tag), number(s[tag])) for tag in tags])

    @cached_property
    def requests(self) -> pa.Table:
        """A row a request, see `tables.requests_table`."""
        return requests_table(self.record, self.domains)

    @cached_property
    def steps(self) -> pa.Table:
        """A row a step, see `tables.steps_table`."""
        return steps_table(self.record, self.n_moe_layers)


def simulate(config: RunConfig, progress: Callable[[float], None] | None = None) -> Result:
    """Run one configuration.

    Parameters
    ----------
    config
        The run.
    progress
        Called now and then with the share of measured requests that have ended, 0 to 1.

    Raises
    ------
    InputError
        If anything in the configuration does not exist or does not fit together.
    """
    setting, workload, record = _run(config, progress)
    return Result(
        summary=_summary(config, setting, workload, record),
        config=_run_again(config, setting.trace),
        record=record,
        domains=setting.trace.domains,
        n_moe_layers=setting.model.n_moe_layers,
    )


def simulate_summary(config: RunConfig) -> dict[str, Any]:
    """Run one configuration for the figures of its ``summary.json`` alone; see `simulate`."""
    return _summary(config, *_run(config, None))


def _run(
    config: RunConfig, progress: Callable[[float], None] | None
) -> tuple[Setting, Workload, RunRecord]:
    setting = prepare(config)
    workload, window = offered_load(config, setting.trace)
    return setting, workload, build_cluster(config, setting, workload, window).run(progress)


def prepare(config: RunConfig) -> Setting:
    """Load model, GPU, tables and trace, and check that they fit together.

    Step times and traces are kept for the next run of this process.
    """
    model = load_model(config.model)
    if (
        config.expert_placement != "linear"
        and config.pool("decode").parallelism.n_expert_ranks == 1
    ):
        raise InputError(
            "expert_placement",
            f"{config.expert_placement!r} places the experts of expert-parallel GPUs, and every "
            "GPU here holds all",
            "--enable-expert-parallel with --tensor-parallel-size 2 or more",
        )
    trace = _fit_trace(config.trace, model)
    if config.colocated and config.prefill != Pool():
        raise InputError("prefill", "co-located workers are one pool", "decode, or none")
    decode = _engine(config, "decode", model)
    prefill = decode if config.colocated else _engine(config, "prefill", model)
    output_len = config.effective_output_len
    spec = ClusterSpec(
        n_prefill=config.n_prefill,
        n_decode=config.n_decode,
        prefill=prefill,
        decode=decode,
        max_model_len=_max_model_len(config, model),
        block_size=config.block_size,
        transfer=PRESETS[config.kv_transfer].over(
            prefill.step_time.gpu.nic_bandwidth,
            decode.step_time.gpu.nic_bandwidth,
            pull_between(model, prefill.parallelism, decode.parallelism),
        ),
        load_report_delay_s=config.load_report_delay_ms / 1e3,
        signal_interval_s=config.signal_interval_ms / 1e3,
        max_concurrency=config.max_concurrency,
        max_tokens=output_len if isinstance(output_len, int) else None,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
    )
    return Setting(model, trace, spec)


def _engine(config: RunConfig, role: str, model: ModelDims) -> EngineSpec:
    """Return what every worker of a pool is: settings that are not given are vLLM's defaults."""
    pool = config.pool(role)
    assert pool.gpu is not None
    gpu, parallelism = load_gpu(pool.gpu), pool.parallelism
    budget = pool.max_num_batched_tokens or gpu.max_num_batched_tokens
    max_num_seqs = pool.max_num_seqs or min(gpu.max_num_seqs, budget)
    if max_num_seqs > budget:
        raise InputError(
            "max_num_batched_tokens",
            f"{budget} is below max_num_seqs {max_num_seqs}",
            f"{max_num_seqs} or more",
        )
    n_blocks = kv_blocks(model, gpu, config.gpu_memory_utilization, config.block_size, parallelism)
    step_time = _step_time(
        model,
        gpu,
        parallelism,
        max_num_seqs,
        budget,
        _max_model_len(config, model),
        config.host_gap_ms,
        config.tables,
    )
    return EngineSpec(step_time, max_num_seqs, budget, n_blocks, parallelism)


def _max_model_len(config: RunConfig, model: ModelDims) -> int:
    """Return the longest context of a worker, which the model's positions limit."""
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        problem = f"{config.max_model_len} is beyond the positions of {model.name}"
        raise InputError("max_model_len", problem, f"up to {longest}")
    return config.max_model_len


@lru_cache(maxsize=8)
def _step_time(
    model: ModelDims,
    gpu: GPU,
    parallelism: Parallelism,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    host_gap_ms: float | None,
    tables: str | None,
) -> StepTimeModel:
    return build_step_time_model(
        model,
        gpu,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        parallelism=parallelism,
        host_gap_s=None if host_gap_ms is None else host_gap_ms / 1e3,
        tables=[] if tables is None else _tables(Path(tables)),
    )


def _tables(folder: Path) -> list[LatencyTable]:
    """Load the latency tables of a folder; it must hold one at least."""
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise InputError("tables", f"{folder} holds no latency table", "a folder of .parquet files")
    return [load_table(path) for path in paths]


def offered_load(config: RunConfig, trace: RoutingTrace) -> tuple[Workload, tuple[float, float]]:
    """Return the requests of a run and the window, s, in which those that count arrive."""
    warmup = config.warmup_s
    window = (warmup, np.inf if config.num_requests else warmup + config.duration)
    horizon = None if config.num_requests else warmup + _WINDOWS_OF_ARRIVALS * config.duration
    workload = make_workload(
        trace,
        workload=config.workload,
        request_rate=config.effective_rate,
        burstiness=config.burstiness,
        horizon_s=horizon,
        num_requests=config.num_requests,
        output_len=config.effective_output_len,
        seed=config.seed,
        domain_mix=config.domain_mix,
        trace_replay=config.trace_replay,
        prompts=config.prompts,
    )
    arrivals = workload.arrival_s
    if not ((arrivals >= window[0]) & (arrivals < window[1])).any():
        raise InputError(
            "warmup",
            f"none of {len(arrivals)} requests arrives in the measured window "
            f"[{window[0]:g} s, {window[1]:g} s)",
            "a shorter warm-up, a longer duration or a higher rate",
        )
    return workload, window


def build_cluster(
    config: RunConfig, setting: Setting, workload: Workload, window: tuple[float, float]
) -> Cluster:
    """Put the cluster of a run together, policies fitted."""
    trace = setting.trace

    mix = None if config.domain_mix is None else tuple(config.domain_mix.items())

    def calibration() -> CalibrationSet:
        return _calibration(trace, config.workload, mix, "count")

    def artifact(
        transform: Transform, layer_mask: LayerMask, clustering: Method
    ) -> RoutingArtifact:
        return _fit(
            trace, config.workload, mix, config.n_decode, config.seed, transform, layer_mask,
            clustering,
        )  # fmt: skip

    model, step_time = setting.model, setting.step_time
    replay = replay_of(
        trace, model.top_k, step_time.n_moe_layers, workload.decode_request.astype(np.int64)
    )

    def future(request: int) -> NDArray[np.float64]:
        window, offset, steps = (
            int(column[request])
            for column in (workload.decode_request, workload.replay_offset, workload.output_len)
        )
        return replay.activation(window, offset, steps, step_time.n_experts)

    decode = decode_policy(
        config.policy,
        PolicyContext(
            n_workers=config.n_decode,
            rng=stream(config.seed, "decode policy"),
            calibration=calibration,
            artifact=artifact,
            step_times=step_time.cost,
            future=future,
        ),
    )
    prefill = None
    if config.colocated:
        _check_colocated(config, decode)
    else:
        prefill = prefill_policy(
            config.prefill_policy,
            PolicyContext(
                n_workers=config.n_prefill,
                rng=stream(config.seed, "prefill policy"),
                prefix_block_tokens=workload.prefix_block_tokens or config.block_size,
            ),
        )
    prompts = np.union1d(workload.trace_request, workload.prefix_trace_request)
    score: PromptScore = getattr(decode, "signature_score", "count")
    spec = setting.spec
    if getattr(decode, "reads_signature", False):
        if score == "count":
            trace.require_prompts(f"the signatures of policy {config.policy!r}")
        costs = getattr(decode, "parameters", None)
        if not isinstance(costs, SignatureParameters):  # another package's, without own figures
            costs = SignatureParameters()
        spec = replace(
            spec,
            capture_s=costs.capture_overhead_ms / 1e3,
            routing_s=costs.routing_overhead_ms / 1e3,
        )
    last_arrival = float(workload.arrival_s[-1])
    return Cluster(
        spec,
        spec.decode.parallelism.shard(model),
        workload,
        replay,
        PromptSignatures(trace, score, prompts),
        prefill,
        decode,
        window,
        time_limit_s=np.inf
        if config.num_requests
        else _TIME_LIMIT_FACTOR * max(last_arrival, window[1]),
        expert_masks=_expert_masks(config, setting, getattr(decode, "artifact", None)),
        prompts=prompt_rows(trace, workload) if trace.has_prompts else None,
        queue_keys=_queue_keys(config, workload),
    )


def _queue_keys(config: RunConfig, workload: Workload) -> NDArray[np.float64]:
    """Return what the queue order makes of each request."""
    context = PolicyContext(config.n_decode, stream(config.seed, "queue order"))
    order = queue_order(config.queue_order, context)
    keys = np.asarray(order.keys(Waiting(workload.prompt_len.astype(np.int64))), np.float64)
    if keys.shape != workload.prompt_len.shape or np.isnan(keys).any():
        raise ValueError(f"queue order {config.queue_order!r} gives no key to each request")
    return keys


@lru_cache(maxsize=8)
def _calibration(
    trace: RoutingTrace,
    workload: str,
    domain_mix: tuple[tuple[str, float], ...] | None,
    score: PromptScore,
) -> CalibrationSet:
    """Pick calibration requests; those picked before are not read again by this process."""
    mix = None if domain_mix is None else dict(domain_mix)
    return calibration_set(trace, workload=workload, domain_mix=mix, score=score)


@lru_cache(maxsize=16)
def _fit(
    trace: RoutingTrace,
    workload: str,
    domain_mix: tuple[tuple[str, float], ...] | None,
    n_decoders: int,
    seed: int,
    transform: Transform,
    layer_mask: LayerMask,
    clustering: Method,
) -> RoutingArtifact:
    """Fit ELDR's router; a sweep's points differ in what no fit depends on, such as the rate."""
    return cached_fit(
        trace,
        workload,
        None if domain_mix is None else dict(domain_mix),
        lambda: _calibration(trace, workload, domain_mix, score_of(transform)),
        n_decoders,
        seed,
        transform=transform,
        layer_mask=layer_mask,
        clustering=clustering,
    )


def _check_colocated(config: RunConfig, policy: DecodePolicy) -> None:
    if getattr(policy, "reads_signature", False):
        raise InputError(
            "policy",
            f"{config.policy!r} reads expert signatures, which no prefill has made when a request "
            "arrives at co-located workers",
            "a policy that needs none, such as jsq, or a topology such as 8P16D",
        )


def _expert_masks(
    config: RunConfig, setting: Setting, fitted: RoutingArtifact | None
) -> NDArray[np.uint64] | None:
    """Return the experts on each GPU of each worker; None where every GPU holds all.

    Prefill workers come first; their experts are placed linearly.
    """
    spec, n_experts = setting.spec, setting.model.n_experts
    ranks = [engine.parallelism.n_expert_ranks for engine in (spec.prefill, spec.decode)]
    if max(ranks) == 1:
        return None
    context = PolicyContext(spec.n_decode, stream(config.seed, "placement"), artifact=fitted)
    prefill, decode = LinearPlacement(context), placement_policy(config.expert_placement, context)
    layers = setting.trace.manifest.n_layers
    placements = [
        policy.place(ExpertGroup(worker, layers, n_experts, n_ranks))
        for policy, n_workers, n_ranks in (
            (prefill, spec.n_prefill, ranks[0]),
            (decode, spec.n_decode, ranks[1]),
        )
        for worker in range(n_workers)
    ]
    return rank_masks(placements, n_experts, setting.model.n_moe_layers)


@lru_cache(maxsize=4)
def _opened(path: str, stamp: float) -> RoutingTrace:
    return open_trace(path)


@lru_cache(maxsize=4)
def _fitted(path: str, stamp: float, model: ModelDims) -> RoutingTrace:
    return fit_trace(_opened(path, stamp), model)


def _fit_trace(name: str, model: ModelDims) -> RoutingTrace:
    """Open a trace as a model replays it; not done again unless the folder has changed."""
    manifest = Path(name) / "manifest.json"
    return _fitted(name, os.stat(manifest).st_mtime if manifest.exists() else 0.0, model)


def _topology(config: RunConfig) -> str:
    """State the workers, and the GPUs of each and of all."""
    pools = [("co-located" if config.colocated else "decode", config.n_decode, "decode")]
    if not config.colocated:
        pools.insert(0, ("prefill", config.n_prefill, "prefill"))
    sizes = [config.pool(role).tensor_parallel_size or 1 for *_, role in pools]
    gpus = ["1 GPU" if size == 1 else f"{size} GPUs" for size in sizes]
    alike = len(set(sizes)) == 1
    workers = " + ".join(
        f"{n} {kind}" if alike else f"{n} {kind} of {size}"
        for (kind, n, _), size in zip(pools, gpus, strict=True)
    )
    said = f"{workers} workers of {gpus[0]}" if alike else f"{workers}"
    return said if max(sizes) == 1 else f"{said}: {config.n_gpus} GPUs"


def _gpus(setting: Setting) -> str:
    """Name the GPU of the workers, or those of the two pools."""
    prefill, decode = (
        engine.step_time.gpu.name for engine in (setting.spec.prefill, setting.spec.decode)
    )
    return decode if prefill == decode else f"{prefill} (prefill) and {decode} (decode)"


def _workers(engine: EngineSpec) -> dict[str, int]:
    return {
        "tensor_parallel_size": engine.parallelism.tensor_parallel_size,
        "expert_parallel_size": engine.parallelism.n_expert_ranks,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_blocks_per_worker": engine.n_blocks,
    }


def _provenance(setting: Setting) -> dict[str, dict[str, Any]]:
    """Return what each part of a step time rests on, pool by pool where that differs."""
    prefill, decode = setting.spec.prefill.step_time, setting.step_time
    if prefill.provenance == decode.provenance:
        return decode.provenance
    pools = {"prefill": prefill, "decode": decode}
    return {
        f"{role}.{part}": entry
        for role, step_time in pools.items()
        for part, entry in step_time.provenance.items()
    }


def _summary(
    config: RunConfig, setting: Setting, workload: Workload, record: RunRecord
) -> dict[str, Any]:
    model, step_time, trace, spec = setting.model, setting.step_time, setting.trace, setting.spec
    started, window = record.decode_steps["start"], record.window
    steps = record.decode_steps[(started >= window[0]) & (started < window[1])]
    outside = {
        "moe_batch": int((steps["batch"] > step_time.moe_batch_max).sum()),
        "attention_batch": int((steps["batch"] > step_time.attention_batch_max).sum()),
        "attention_context": int(
            (steps["context"] > step_time.context_max * np.maximum(steps["batch"], 1)).sum()
        ),
        "attention_tokens": int((steps["context"] > step_time.attention_tokens_max).sum()),
    }
    tiles = -(-model.n_moe_layers // trace.manifest.n_layers)
    copies = copies_met(trace, workload, record, steps)
    gpu, provenance = _gpus(setting), _provenance(setting)
    warnings = (*step_time.warnings, *spec.prefill.step_time.warnings)
    return {
        "label": f"{config.policy}, {config.topology} workers, {model.name} on {gpu}",
        "backend": "eldr-sim",
        "model_id": model.name,
        "gpu": gpu,
        "topology": _topology(config),
        "expert_placement": config.expert_placement,
        "policy": config.policy,
        "prefill_policy": None if config.colocated else config.prefill_policy,
        "queue_order": config.queue_order,
        "seed": config.seed,
        **summarise(record, config, model.n_moe_layers),
        **_workers(spec.decode),
        **({} if spec.prefill == spec.decode else {"prefill_workers": _workers(spec.prefill)}),
        "kv_transfer": "none: co-located workers"
        if config.colocated
        else f"{config.kv_transfer}: {spec.transfer.source}",
        "weakest_provenance": weakest(entry["label"] for entry in provenance.values()),
        "provenance": provenance,
        "lookups_outside_tables": outside,
        "latency_warnings": list(dict.fromkeys(warnings)),
        "prompt_experts": "recorded" if trace.has_prompts else "uniform",
        "trace": {
            "name": Path(config.trace).name,
            "model": trace.manifest.model,
            "provenance": trace.manifest.provenance,
            "checksum": trace.manifest.checksum,
            "layers": f"{trace.manifest.n_layers} recorded layers"
            + (
                ""
                if trace.kept_top_k is None
                else f", the first {trace.top_k} of {trace.manifest.top_k} experts a token,"
            )
            + (
                ""
                if tiles == 1
                else f" tiled over {model.n_moe_layers}, each tile rotated by another part of "
                "the request"
            ),
            **workload.description,
            **copies,
        },
        "trace_warnings": trace_warnings(trace, copies, config.trace_replay),
    }


def _run_again(config: RunConfig, trace: RoutingTrace) -> dict[str, Any]:
    return {
        "config": config.model_dump(mode="json"),
        "trace_checksum": trace.manifest.checksum,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("eldr-sim", "numpy", "numba", "simpy", "pyarrow")},
        },
    }
