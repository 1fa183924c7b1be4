"""The summary of a run, ``summary.json``, with its warnings."""

import math
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Ints, Records
from eldr_sim.kernel_profiles.kernels.flops import mfu, peak_flops, prefill_work
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.calibration import load_calibration
from eldr_sim.kernel_profiles.tables.format import weakest
from eldr_sim.policies import registry
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.control.relocation import BYTES_ALONE, PROVENANCE
from eldr_sim.simulator.outcome.bottleneck import is_overload, limits_of
from eldr_sim.simulator.outcome.error_band import at_bad_end, band_of, kind_of
from eldr_sim.simulator.outcome.fault_metrics import fault_figures
from eldr_sim.simulator.outcome.load_warnings import load_warnings
from eldr_sim.simulator.outcome.metrics import describe, draft_counters, peak_concurrency, summarise
from eldr_sim.simulator.outcome.scaling_metrics import scaling_figures
from eldr_sim.simulator.outcome.session_metrics import reuse_figures, session_figures, tier_figures
from eldr_sim.simulator.outcome.unused_options import unused_options
from eldr_sim.simulator.outcome.window_steps import added, steps_within
from eldr_sim.simulator.setup import transfer
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import PreparedRun, late_reservation
from eldr_sim.simulator.setup.transfer import HAND_OVERS
from eldr_sim.traces.routing.calibration import calibration_requests
from eldr_sim.traces.routing.copies import WARN_ABOVE, copy_share, expected_copy_share
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.manifest import in_short, one_phase, rests_on
from eldr_sim.traces.workload import Workload


def copies_met(
    trace: RoutingTrace, workload: Workload, record: RunRecord, sizes: Ints
) -> dict[str, float]:
    """Return how often copies of a trace request met in a batch, the share of decode time in the
    window, and how often to expect it: of the mean batch drawn at random, by the mix. ``sizes``:
    steps of each batch."""
    begin, end = record.window[0], min(record.window[1], record.end_s)
    joined = np.flatnonzero(record.requests["decode_start_s"] >= 0)
    decoded = record.requests[joined]
    finish = np.where(decoded["finish_s"] >= 0, decoded["finish_s"], end)
    start = np.clip(decoded["decode_start_s"], begin, end)
    beside = copy_share(
        decoded["decode_worker"].astype(np.int64),
        start,
        np.maximum(np.clip(finish, begin, end), start),
        workload.decode_request[record.numbers[joined]].astype(np.int64),
    )
    batch = np.arange(len(sizes))
    shares = workload.description["domain_mix"]
    pools = {name: len(trace.requests_of([name], calibration=False)) for name in shares}
    # A request finds itself in a batch of this size: each batch counts once a member.
    members = int(sizes @ batch)
    seen_by_a_request = int(sizes @ batch**2) / members if members else 1.0
    expected, _ = expected_copy_share(pools, shares, max(seen_by_a_request, 1.0))
    return {"copies_share": round(beside, 6), "copies_share_expected": round(expected, 6)}


def trace_warnings(
    trace: RoutingTrace, copies: dict[str, float], trace_replay: str, fit: tuple[int, int] = (0, 0)
) -> list[str]:
    """Return what the trace cannot stand for, a line each.

    ``fit``: the router's calibration requests, and the clusters that it fitted to them."""
    warnings = []
    n_fitted, n_clusters = fit
    if n_fitted < n_clusters:
        warnings.append(
            f"the router's {n_clusters} clusters were fitted to {n_fitted} calibration requests, "
            "each cut into pieces"
        )
    if not trace.has_prompts:
        warnings.append(
            "the routing trace is decode-only: prompts are priced at uniform routing, first tokens "
            "replay the experts of the token after them, and nothing here says how policies with "
            "signatures would do"
        )
    if (stands := one_phase(trace.manifest)) is not None:
        warnings.append(stands)
    if copies["copies_share"] > WARN_ABOVE:
        warnings.append(
            f"the routing trace is small for this run: {100 * copies['copies_share']:.0f}% of "
            "decode time was spent beside a copy of the same trace request (batches drawn at "
            f"random: {100 * copies['copies_share_expected']:.0f}%), so unions are too small"
            + (
                " and gains of locality too large; --trace-replay same_domain shows by how much"
                if trace_replay == "own"
                else ""
            )
        )
    return warnings


def _topology(config: RunConfig) -> str:
    """State the workers, and the GPUs of each and of all."""
    sizes = [_size(pool.parallelism) for pool in config.pools]
    alike = len(set(sizes)) == 1
    workers = " + ".join(
        f"{pool.workers} {pool.kind}" if alike else f"{pool.workers} {pool.kind} of {size}"
        for pool, size in zip(config.pools, sizes, strict=True)
    )
    said = f"{workers} workers of {sizes[0]}" if alike else f"{workers}"
    return said if set(sizes) == {"1 GPU"} else f"{said}: {config.n_gpus} GPUs"


def _size(layout: Parallelism) -> str:
    """State the GPUs of a worker, and how many engines have them."""
    size = layout.tensor_parallel_size
    gpus = "1 GPU" if size == 1 else f"{size} GPUs"
    engines = layout.data_parallel_size
    if layout.pipeline_parallel_size > 1:
        return f"{layout.pipeline_parallel_size} stages of {gpus}"
    beside = f" and {layout.ffn_ranks} FFN GPUs" if layout.ffn_ranks else ""
    return gpus if engines == 1 else f"{engines} engines of {gpus}{beside}"


def _gpus(prepared: PreparedRun) -> str:
    gpus = {pool.name: pool.engine.step_time.gpu.name for pool in prepared.spec.pools}
    if len(set(gpus.values())) == 1:
        return prepared.spec.decode.step_time.gpu.name
    *others, last = (f"{gpu} ({name})" for name, gpu in gpus.items())
    return f"{', '.join(others)} and {last}"


def _workers(engine: EngineSpec) -> dict[str, int]:
    return {
        "kv_blocks_per_worker": engine.n_blocks,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tensor_parallel_size": engine.parallelism.tensor_parallel_size,
        "expert_parallel_size": engine.parallelism.n_expert_ranks,
        "pipeline_parallel_size": engine.parallelism.pipeline_parallel_size,
    }


def _block_bytes(prepared: PreparedRun) -> float:
    """Return the bytes of a KV block on all GPUs of an engine that computes prompts."""
    layout = prepared.spec.prefill.parallelism
    shard = layout.shard(prepared.model).kv_bytes_per_token
    gpus = layout.engine_gpus
    return float(shard * prepared.spec.block_size * gpus)


def _front_end(spec: ClusterSpec, record: RunRecord) -> dict[str, Any]:
    """Return the API servers, and how long measured requests are with them."""
    front = spec.front_end
    if front is None:
        return {}
    requests = record.requests[record.requests["measured"] & record.completed]
    seconds = requests["tokenized_s"] - requests["sent_s"]
    return {
        "front_end": {
            "cpu": front.latency.metadata.gpu,
            "cpu_slowdown": front.latency.slowdown,
            "api_servers": front.n_servers,
            "tokenizer_mode": front.mode,
            "tokenizer_threads": front.threads,
            **{k.replace("_front_end", ""): v for k, v in describe("front_end", seconds).items()},
        }
    }


def _streaming(config: RunConfig, engine: EngineSpec, record: RunRecord) -> dict[str, Any]:
    """Return what streams of the experts of prefill workers, and how long steps waited for it."""
    plan = None if engine.layout is None else engine.layout.stream
    if plan is None:
        return {}
    return {
        "weight_streaming": {
            "expert_gather": config.experts.expert_gather,
            "offload_window": plan.window or None,
            "layer_bytes": plan.layer_bytes,
            "gather_ms": 1e3 * plan.stream.gather_s,
            "host_copy_ms": 1e3 * plan.stream.host_s,
            "wait_share": record.stall_s / record.streamed_s if record.streamed_s else None,
        }
    }


def _group(engine: EngineSpec, steps: Records) -> dict[str, Any]:
    """Return what the engines of a pool that share experts take together, means over steps."""
    if engine.all_to_all is None:
        return {}
    n, busy, pairs = len(steps), int(steps["n_busy"].sum()), float(steps["pairs"].sum())
    seconds, ranks = float((steps["end"] - steps["start"]).sum()), engine.parallelism.n_expert_ranks

    def mean(name: str, unit: float = 1.0) -> float | None:
        return unit * float(steps[name].mean()) if n else None

    apart = {}
    if engine.group is not None and engine.group.ffn_ranks:
        ends = float(steps["own_s"].mean()) if n else 0.0
        apart = {
            "ffn_ranks": engine.group.ffn_ranks,
            "micro_batches": engine.group.micro_batches,
            "mean_attention_ms": mean("own_s", 1e3),
            "mean_attention_idle_ms": 1e3 * (seconds / n - ends) if n else None,
            "mean_ffn_idle_ms": (
                1e3 * (seconds / n - float((steps["moe_s"] + steps["choice_s"]).mean()))
                if n
                else None
            ),
        }
    return {
        "group": {
            "data_parallel_size": engine.parallelism.data_parallel_size,
            **apart,
            "all2all_backend": engine.all_to_all.backend,
            "steps": n,
            "mean_step_ms": 1e3 * seconds / n if n else None,
            "mean_moe_ms": mean("moe_s", 1e3),
            "mean_dispatch_ms": mean("dispatch_s", 1e3),
            "mean_combine_ms": mean("combine_s", 1e3),
            "mean_replica_choice_ms": mean("choice_s", 1e3),
            "mean_idle_ms": 1e3 * float(steps["wait_s"].sum()) / busy if busy else None,
            "mean_busy_engines": busy / n if n else None,
            "mean_inside_bytes": mean("inside_bytes"),
            "mean_between_bytes": mean("between_bytes"),
            "busiest_rank_pairs_over_mean": (
                float(steps["busiest_pairs"].sum()) * ranks / pairs if pairs else None
            ),
        }
    }


def run_figures(record: RunRecord, config: RunConfig, n_moe_layers: int) -> dict[str, Any]:
    """Return the figures that a run of a configuration yields, `metrics.summarise`."""
    return summarise(
        record, config.requests, config.pools, config.output.goodput, n_moe_layers,
        conditional=config.cluster.conditional_disagg,
        prefix_caching=config.engine.enable_prefix_caching,
    )  # fmt: skip


def _prefill_mfu(config: RunConfig, prepared: PreparedRun, record: RunRecord) -> float | None:
    """Return the share of the prefill GPUs' peak that the window's prompts took."""
    if not config.cluster.n_prefill:
        return None
    start, end = record.window[0], min(record.window[1], record.end_s)
    ended, requests = record.requests["prefill_end_s"], record.requests
    stayed = (requests["decode_start_s"] >= 0.0) & (requests["transfer_start_s"] < 0.0)
    inside = requests[(start <= ended) & (ended <= end) & ~stayed]
    work = prefill_work(prepared.model)
    lengths = (inside["prompt_len"] - inside["cached_tokens"]).tolist()
    flops = math.fsum(map(work.flops, lengths, inside["cached_tokens"].tolist()))
    peak = math.fsum(
        made.workers
        * made.parallelism.n_gpus
        * peak_flops(prepared.model, pool.engine.step_time.gpu)
        for made, pool in zip(config.pools, prepared.spec.pools, strict=True)
        if not pool.decodes
    )
    return mfu(flops, end - start, peak) if end > start else None


def _events(spec: ClusterSpec, record: RunRecord) -> list[dict[str, float | int | str | None]]:
    """Return the relocations; ``in_force_s`` is None where the run ended before."""
    log = record.relocations
    return [
        {"pool": spec.names[row["pool"]], "worker": int(row["group"])}
        | {"experts": int(row["experts"])}
        | {name: float(row[name]) for name in log.dtype.names or () if row[name].dtype == float}
        | ({"in_force_s": None} if row["in_force_s"] < 0.0 else {})
        for row in log
    ]


def _provenance(prepared: PreparedRun) -> dict[str, dict[str, Any]]:
    """Return what each part of a step time rests on, pool by pool where that differs."""
    pools = {
        pool.name: pool.engine.step_time.provenance
        | ({} if pool.engine.all_to_all is None else pool.engine.all_to_all.provenance)
        | pool.engine.choice_provenance
        | ({} if pool.engine.layout is None else pool.engine.layout.provenance)
        | ({} if pool.engine.speculation is None else pool.engine.speculation.draft.provenance)
        for pool in prepared.spec.pools
    }
    first, *others = pools.values()
    if all(first == other for other in others):
        return first
    return {
        f"{name}.{part}": entry
        for name, provenance in pools.items()
        for part, entry in provenance.items()
    }


def _transfer_provenance(config: RunConfig, spec: ClusterSpec) -> dict[str, dict[str, Any]]:
    """Return what KV transfers and hand-overs rest on; one that takes nothing on nothing."""
    transfer_provenance = {"kv_transfer": transfer.provenance(spec.transfer.source)}
    if config.front_end.handover != "none":
        transfer_provenance["handover"] = transfer.provenance(
            HAND_OVERS[config.front_end.handover].source
        )
    return transfer_provenance


def _transfer_notes(prepared: PreparedRun, record: RunRecord) -> list[str]:
    """Return how many transfers have more descriptors than measured: long prompts."""
    spec, requests = prepared.spec, record.requests
    if spec.transfer.descriptor_s == 0.0:
        return []
    moved = requests[requests["transfer_start_s"] >= 0.0]
    tokens = moved["prompt_len"] - np.maximum(moved["decode_cached_tokens"], 0)
    layout = spec.decode.parallelism
    pull = transfer.pull_between(prepared.model, spec.prefill.parallelism, layout)
    a_block = layout.shard(prepared.model).n_kv_tensors * pull.sources
    descriptors = -(-tokens // spec.block_size) * a_block
    beyond = int((descriptors > transfer.MEASURED_DESCRIPTORS).sum())
    if not beyond:
        return []
    return [
        f"{beyond / len(moved):.0%} of the KV transfers have more descriptors than the "
        f"{transfer.MEASURED_DESCRIPTORS} measured, up to {int(descriptors.max())}: extrapolated"
    ]


def _trace(
    config: RunConfig, prepared: PreparedRun, workload: Workload, copies: dict[str, Any]
) -> dict[str, Any]:
    model, trace = prepared.model, prepared.trace
    if trace is None:
        return {"name": None, "model": model.name, "checksum": None, **workload.description}
    about = trace.manifest
    tiles = -(-model.n_moe_layers // about.n_layers)
    layers = "layers" if about.provenance == "synthetic" else "recorded layers"
    if trace.kept_top_k is not None:
        layers += f", the first {trace.top_k} of {about.top_k} experts a token,"
    if tiles > 1:
        layers += f" tiled over {model.n_moe_layers}, each tile rotated by another part of the"
        layers += " request"
    return {
        "name": "drawn" if config.routing.trace is None else Path(config.routing.trace).name,
        "model": about.model,
        "provenance": about.provenance,
        "rests_on": rests_on(about, model.name),
        "in_short": in_short(about, model.name),
        "checksum": about.checksum,
        "layers": f"{about.n_layers} {layers}",
        **workload.description,
        **copies,
    }


def _batches(record: RunRecord, spec: ClusterSpec) -> tuple[Ints, dict[str, int]]:
    """Return the window's decode steps by their sequences, and those beyond what was measured."""

    names = "moe_batch_max", "attention_batch_max", "context_max", "attention_tokens_max"
    measured = [spec.of_decoders(attrgetter(f"step_time.{name}")) for name in names]
    counts, sizes = np.zeros(4, np.int64), np.zeros(1, np.int64)
    for part in steps_within(record, *record.window):
        limits = [of[part["worker"]] for of in measured]
        sequences, context = part["sequences"], part["context"]
        sizes = added(sizes, np.bincount(sequences))
        counts += [
            np.count_nonzero(part["tokens"] > limits[0]),
            np.count_nonzero(sequences > limits[1]),
            np.count_nonzero(context > limits[2] * np.maximum(sequences, 1)),
            np.count_nonzero(context > limits[3]),
        ]
    beyond = "moe_batch", "attention_batch", "attention_context", "attention_tokens"
    return sizes, dict(zip(beyond, counts.tolist(), strict=True))


def _all_provenance(config: RunConfig, prepared: PreparedRun) -> dict[str, dict[str, Any]]:
    """Return what all that takes time rests on."""
    spec, provenance = prepared.spec, _provenance(prepared)
    if config.experts.eplb_interval is not None:
        provenance = provenance | {"relocation": PROVENANCE}
    if config.cluster.hands_over:
        provenance = provenance | _transfer_provenance(config, spec)
    if spec.front_end is not None:
        provenance = provenance | {"front_end": spec.front_end.latency.provenance}
    return provenance


def _warnings(config: RunConfig, prepared: PreparedRun) -> list[str]:
    model, spec = prepared.model, prepared.spec
    warnings: list[str] = []
    for engine in [pool.engine for pool in reversed(spec.pools)]:
        draft = None if engine.speculation is None else engine.speculation.draft
        for source in (engine.step_time, engine.all_to_all, engine.layout, draft):
            warnings += [] if source is None else source.warnings
    if spec.max_model_len > model.max_position_embeddings:
        warnings.append(
            f"max_model_len {spec.max_model_len} is beyond the {model.max_position_embeddings} "
            f"positions of {model.name}: the model itself answers for none of it"
        )
    if config.experts.eplb_interval is not None and config.experts.eplb_overhead_ms == 0.0:
        warnings.append(BYTES_ALONE)
    if late := late_reservation(config):
        warnings.append(late)
    calibration = load_calibration(config.steps.calibration)
    if calibration is not None and calibration.of is not None:
        steps = [pool.engine.step_time for pool in spec.pools]
        if others := sorted({step.gpu.name for step in steps if step.calibration is None}):
            of = calibration.of
            warnings.append(
                f"calibration: of {of.model} on {of.gpu}; only its front end is applied to "
                f"{model.name} on {', '.join(others)}"
            )
    return list(dict.fromkeys(warnings))


def judged(config: RunConfig, prepared: PreparedRun, record: RunRecord) -> RunConfig:
    """Return the configuration with the objective that predictions are judged by: with
    ``confidence`` the bounds that hold at the bad end of the error band."""
    level = config.output.goodput
    if config.output.confidence is None:
        return config
    band = _band_of(config, prepared, peak_concurrency(record))
    return config.replace(goodput=at_bad_end(level, band))


def _band_of(config: RunConfig, prepared: PreparedRun, in_flight: int) -> dict[str, Any]:
    """Return the band of a run. ``in_flight``: most requests in flight in the cluster."""
    decoders = sum(pool.workers for pool in config.pools if pool.decodes)
    kind = kind_of(
        config.engine.engine,
        prepared.spec.decode.step_time.gpu.name,
        prepared.model,
        apart=config.cluster.hands_over,
        in_flight=in_flight / max(decoders, 1),
    )
    fitted = [pool.engine.step_time.calibration for pool in prepared.spec.pools]
    return band_of(kind, calibrated=all(each is not None and each.of for each in fitted))


def _error_band(
    config: RunConfig, prepared: PreparedRun, summary: dict[str, Any]
) -> dict[str, Any]:
    """Return how wrong the figures may be; throughput only where the load does not set it."""
    band = _band_of(config, prepared, summary["max_concurrent_requests"])
    rate = summary["request_rate"]
    growth = summary["load_growth"]
    if rate is not None and math.isfinite(rate) and not (growth and is_overload(growth)):
        band.pop("throughput", None)  # what arrives is served
    return band


def summary_of(
    config: RunConfig, prepared: PreparedRun, workload: Workload, record: RunRecord
) -> dict[str, Any]:
    """Return what ``summary.json`` holds: the run, its figures, and what they rest on."""
    config = judged(config, prepared, record)
    model, trace, spec = prepared.model, prepared.trace, prepared.spec
    window, (sizes, outside) = record.window, _batches(record, spec)
    copies = {} if trace is None else copies_met(trace, workload, record, sizes)
    gpu, provenance = _gpus(prepared), _all_provenance(config, prepared)
    groups = [
        log[(log["start"] >= window[0]) & (log["start"] < window[1])]
        for log in (record.prefill_group_steps, record.decode_group_steps)
    ]
    policies = config.policies
    router = policies.policy if config.cluster.generates else policies.prefill_policy
    summary: dict[str, Any] = {
        "label": f"{router}, {config.cluster.topology} workers, {model.name} on {gpu}",
        "backend": "eldr-sim",
        "model_id": model.name,
        "gpu": gpu,
        "topology": _topology(config),
        "expert_placement": config.policies.expert_placement,
        "policy": config.policies.policy if config.cluster.generates else None,
        "prefill_policy": config.policies.prefill_policy if config.cluster.n_prefill else None,
        "queue_order": config.policies.queue_order,
        "kv_cache_dtype": model.kv_cache_dtype,
        "seed": config.requests.seed,
        **run_figures(record, config, model.n_moe_layers),
        **reuse_figures(workload, record, spec.block_size, config.engine.enable_prefix_caching),
        **session_figures(workload, record, spec),
        **tier_figures(record, spec, _block_bytes(prepared)),
        **scaling_figures(
            record, config.scaling.autoscale, config.output.goodput, config.pools, spec
        ),
    }
    drafts = {pool.name: pool.engine.speculation for pool in spec.pools if pool.decodes}
    if told := [drafting.describe() for drafting in drafts.values() if drafting is not None]:
        summary["speculative_decoding"] = told[0] | draft_counters(record)
    summary["limits"] = limits_of(record, spec)
    summary["error_band"] = _error_band(config, prepared, summary)
    if config.output.confidence is not None:
        bounds = config.output.goodput.model_dump(exclude_none=True)
        summary["judged_by_ms"] = {name: round(bound, 3) for name, bound in bounds.items()}
    summary["prefill_mfu"] = _prefill_mfu(config, prepared, record)
    summary |= _workers(spec.decode)
    if config.engine.num_gpu_blocks_override is not None:
        summary["num_gpu_blocks_override"] = config.engine.num_gpu_blocks_override
    summary |= _group(spec.decode, groups[1 if config.cluster.generates else 0])
    if not isinstance(config.cluster.topology, str):
        summary["pools"] = {
            pool.name: {"workers": made.workers, "gpu": pool.engine.step_time.gpu.name}
            | _workers(pool.engine)
            | ({"drafts": drafting.k} if (drafting := drafts.get(pool.name)) else {})
            for made, pool in zip(config.pools, spec.pools, strict=True)
        }
    summary |= _streaming(config, spec.prefill, record) | _front_end(spec, record)
    if config.cluster.hands_over and (
        spec.prefill != spec.decode or spec.prefill.group is not None
    ):
        summary["prefill_workers"] = _workers(spec.prefill) | _group(spec.prefill, groups[0])
    if config.experts.eplb_interval is not None:
        summary["relocation_events"] = _events(spec, record)
    if record.retries is not None and (record.states is None or record.faults):
        summary["faults"] = fault_figures(record, config.output.goodput, record.faults)
    summary["kv_transfer"] = f"none: {config.pools[0].kind} workers alone"
    if config.cluster.hands_over:
        summary["kv_transfer"] = f"{config.cluster.kv_transfer}: {spec.transfer.source}"
        summary["handover"] = (
            f"{config.front_end.handover}: {HAND_OVERS[config.front_end.handover].source}"
        )
    experts = None if trace is None else "recorded" if trace.has_prompts else "uniform"
    warned: list[str] = []
    if trace is not None:
        fit, replayed = (0, 0), config.routing.trace_replay
        chosen = registry.parameters("decode", policies.policy)
        if getattr(chosen, "artifact", "") is None:  # fitted on the fly: ELDR's
            load, mix = config.requests.workload, config.routing.domain_mix
            fit = len(calibration_requests(trace, load, mix)), len(spec.routers[-1])
        warned = trace_warnings(trace, copies, replayed, fit)
    return summary | {
        "weakest_provenance": weakest(entry["label"] for entry in provenance.values()),
        "provenance": provenance,
        "lookups_outside_tables": outside,
        "latency_warnings": [
            *_warnings(config, prepared),
            *load_warnings(
                config.requests,
                workload,
                summary["error_band"],
                config.output.goodput,
                config.engine.engine_version,
            ),
        ],
        "window_start_s": record.window[0],
        "latency_notes": _transfer_notes(prepared, record) if config.cluster.hands_over else [],
        "prompt_experts": experts,
        "trace": _trace(config, prepared, workload, copies),
        "without_effect": unused_options(config, prepared, workload, record),
        "trace_warnings": warned,
    }
