"""Options that were given and change nothing: each is refused before a run (`prepare`) where it
contradicts itself, or named here with the reason where it may hold for a point of a sweep."""

import math
from collections.abc import Iterator

from eldr_sim.kernel_profiles.tables.format import load_tables, table_name
from eldr_sim.policies import registry
from eldr_sim.policies.choice import parse
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config.fault_spellings import in_cluster, parse_fail
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS, KVTierConfig, ScalingConfig
from eldr_sim.simulator.setup.config.run_config import Pool, RunConfig
from eldr_sim.simulator.setup.memory import NO_WINDOWS, window_blocks
from eldr_sim.simulator.setup.prepare import PreparedRun
from eldr_sim.traces.requests.session_shape import PRESETS as SESSIONS
from eldr_sim.traces.workload import Workload

_Found = Iterator[tuple[str, str]]
#: Placements that make no copies of experts but the redundant ones.
_WITHOUT_COPIES = {"linear", "eplb", "affinity", "home"}
#: Of prompts alone; a plan of them tells the price of prompt tokens.
NO_TOKEN = "generates none"
#: Autoscalers that know the load and so how many workers there are at the beginning, and those that
#: follow gauges of engines.
_BEGIN = ("none", "timetable", "oracle")
_BY_METRICS = ("hpa", "keda", "knative", "llmd_saturation", "llmd_tokens")
_OF_GROUPS = (
    "replica_choice", "all2all_backend", "moe_dp_chunk_size", "two_batch_overlap", "gpus_per_node",
    "prefill_schedule_interval", "prefill.all2all_backend", "decode.all2all_backend",
)  # fmt: skip


def unused_options(
    config: RunConfig, prepared: PreparedRun, workload: Workload, record: RunRecord
) -> list[str]:
    """Return a line for each field that differs from its default and changed nothing."""
    given = _given(config)
    engines = [pool.engine for pool in prepared.spec.pools]
    lines: dict[str, str] = {}
    for unused in (
        _of_routers(config, prepared),
        _of_workers(config, prepared, engines, workload, record),
        _of_pools(config),
        _of_requests(config),
        _of_faults(config, record),
        _of_scaling(config),
    ):
        for name, why in unused:
            if name in given:
                lines.setdefault(name, f"{name} has no effect: {why}")
    return [*lines.values(), *_of_tables(config, prepared), *_late_faults(config, record)]


def _given(config: RunConfig) -> set[str]:
    """Return the fields that are not at their defaults; those of pools as ``decode.gpu``."""
    fields = RUN_FIELDS
    found = {name for name in fields if config.value(name) != fields[name].default}
    for role in ("prefill", "decode"):
        own: Pool = getattr(config.cluster, role)
        found |= {f"{role}.{name}" for name, value in own.model_dump().items() if value is not None}
    return found


def _of_routers(config: RunConfig, prepared: PreparedRun) -> _Found:
    spec = prepared.spec
    choices = {
        "policy": len(spec.routers[-1]) if config.cluster.generates else 0,
        "prefill_policy": len(spec.routers[0]) if config.cluster.n_prefill else 0,
    }
    reads_load = reads_signals = reads_caches = False
    for field, n in choices.items():
        needs = registry.needs(field, config.value(field))
        if n == 0:
            ends = (
                "there is no such worker"
                if config.cluster.generates
                else "requests end with their prompts"
            )
            yield field, f"{config.cluster.topology} does not make this choice: {ends}"
        elif n == 1 and needs.signature is None:
            yield field, "there is one engine to choose"
        if n > 1:
            reads_load |= bool(needs.columns)
            reads_signals |= needs.signals or needs.matched
            reads_caches |= needs.matched
    if not reads_load:
        yield "load_report_delay_ms", "no router chooses by load"
    if not reads_signals:
        yield "signal_interval_ms", "no router reads what engines publish"
    if not reads_caches:
        yield "kv_signal", "no router asks what prefix caches hold"


def _of_workers(
    config: RunConfig,
    prepared: PreparedRun,
    engines: list[EngineSpec],
    workload: Workload,
    record: RunRecord,
) -> _Found:
    groups = [engine for engine in engines if engine.group is not None]
    if not config.cluster.hands_over:
        for name in ("kv_transfer", "handover", "answer_kv", "kv_reserve"):
            yield name, f"no KV cache is handed over in {config.cluster.topology}"
    elif workload.parent is None:
        yield "answer_kv", "no request continues another (--workload chat)"
    if not groups:
        for name in _OF_GROUPS:
            yield name, "no engines share experts and exchange tokens"
    elif all(
        engine.parallelism.n_gpus <= min(8, config.cluster.gpus_per_node) for engine in groups
    ):
        yield "gpus_per_node", "the GPUs that share experts are in one node, as they are by default"
    if not any(engine.group.ffn_ranks for engine in groups if engine.group is not None):
        yield "micro_batches", "no worker has separate FFN GPUs"
    placements = {str(pool.expert_placement) for pool in config.pools}
    alone = {parse(word, "expert_placement").name for word in placements} <= _WITHOUT_COPIES
    if groups and alone and not any(engine.n_redundant for engine in groups):
        yield "replica_choice", "every expert has one instance"
    if config.cluster.n_prefill and not record.requests["preemptions"].any():
        yield "prefill_schedule_interval", "workers that decode compute no prompts"
    if (config.engine.long_prefill_token_threshold or 0) >= max(
        engine.max_num_batched_tokens for engine in engines
    ):
        yield "long_prefill_token_threshold", "every step has room for fewer tokens"
    if all(engine.layout is not None and engine.layout.whole_prompts for engine in engines):
        yield "long_prefill_token_threshold", "prompts are computed whole"
    if not config.cluster.generates:
        for name in ("async_scheduling", "trace_replay"):
            yield name, "no worker decodes"
    if all(engine.parallelism.n_gpus == 1 for engine in engines):
        for name in ("enable_expert_parallel", "prefill.enable_expert_parallel",
                     "decode.enable_expert_parallel"):  # fmt: skip
            yield name, "every worker has one GPU, which has all experts"
    if prepared.model.is_dense:
        yield "trace_replay", f"{prepared.model.name} is dense: no experts are replayed"
    if workload.prefix_block_tokens == 0:
        for name in ("enable_prefix_caching", *KVTierConfig.model_fields):
            yield name, "no two prompts begin alike"
    elif not config.engine.enable_prefix_caching:
        yield "kv_tier", "no worker keeps a prefix (enable_prefix_caching)"
    if not config.kv.kv_tier:
        for name in KVTierConfig.model_fields.keys() - {"kv_signal", "answer_kv"}:
            if config.kv.answer_kv != "pull" or name == "kv_overlap":
                yield name, "there are no tiers (--kv-tier)"
    elif config.kv.kv_overlap == "layers":
        yield "kv_in_flight", "no request waits for blocks outside the batch (--kv-overlap layers)"
    if window_blocks(prepared.model, prepared.spec.block_size) == NO_WINDOWS:
        yield ("disable_hybrid_kv_cache_manager", f"{prepared.model.name} has no sliding windows")
    if config.experts.kv_cache_free:
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            yield name, "workers keep no KV cache (kv_cache_free)"
    of_vllm = all((pool.engine or config.engine.engine) == "vllm" for pool in config.pools)
    if config.engine.num_gpu_blocks_override is not None:
        if of_vllm:
            for name in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
                yield name, "num_gpu_blocks_override says how many blocks there are"
    elif config.engine.kv_cache_memory_bytes is not None:
        yield "gpu_memory_utilization", "kv_cache_memory_bytes says how large the KV cache is"
    if all(pool.enforce_eager for pool in config.pools):
        none = "there are no CUDA graphs (enforce_eager)"
        yield from [("cudagraph_padding", none), ("max_cudagraph_capture_size", none)]
    elif all(engine.step_time.gpu.launch_s is None for engine in engines):
        yield ("max_cudagraph_capture_size", "how fast the GPU's host launches is not known")
    if of_vllm and config.scheduler.piecewise_cuda_graph:
        yield "piecewise_cuda_graph", "vLLM captures prompts unless told otherwise"
    if not prepared.model.shared_intermediate_size:
        yield "shared_experts_fusion", f"{prepared.model.name} has no shared experts"
    window = config.experts.offload_window
    if window is not None and window >= prepared.model.n_moe_layers - 1:
        yield "offload_window", "the experts of all layers fit on the GPUs"
    if not config.scheduler.batch_wait_max_tokens_ratio:
        yield "batch_wait_timeout_iters", "prompts wait for no tokens (batch_wait_max_tokens_ratio)"
    if not config.scheduler.batch_wait_timeout_iters:
        yield "batch_wait_max_tokens_ratio", "prompts wait for no step (batch_wait_timeout_iters)"
    if all(engine.group is None for engine in engines):
        yield "attention_dp_balance", "no engines share experts"
    if not config.scheduler.attention_dp_balance:
        for name in ("attention_dp_timeout_iters", "attention_dp_batching_wait_iters"):
            yield name, "prompts do not wait for other engines (attention_dp_balance)"
    if config.front_end.tokenizer_mode == "microbatch_sequential":
        yield "tokenizer_threads", "microbatch_sequential tokenises one prompt after the other"


def _of_pools(config: RunConfig) -> _Found:
    """Name what all pools have of their own, and prices that do not add up."""
    roles = list(dict.fromkeys(pool.role for pool in config.pools))
    for name in Pool.model_fields:
        if name != "expert_placement" and all(
            getattr(getattr(config.cluster, role), name) is not None for role in roles
        ):
            yield name, f"every pool has its own ({', '.join(f'{r}.{name}' for r in roles)})"
    if config.price_per_hour is None:
        for role in roles:
            yield f"{role}.price_per_gpu_hour", "the other pool has no price"
    elif not config.cluster.generates:
        for name in ("price_per_gpu_hour", "prefill.price_per_gpu_hour"):
            yield (name, f"costs are per generated token, and {config.cluster.topology} {NO_TOKEN}")


def _of_requests(config: RunConfig) -> _Found:
    if not config.requests.from_file:
        yield "arrivals", f"those of workload {config.requests.workload} are drawn in any case"
    if config.requests.workload not in SESSIONS:
        for name in ("sessions", "history", *SESSIONS["chat"]):
            yield name, f"workload {config.requests.workload} draws no sessions (chat, agent)"
    calls = config.requests.calls_per_turn or SESSIONS.get(config.requests.workload, {}).get(
        "calls_per_turn"
    )
    if calls == "1":
        yield "tool_time", "no turn calls a tool (--calls-per-turn)"
    if config.requests.arrivals != "closed":
        for name in ("recorded_ttft_ms", "recorded_tpot_ms"):
            yield name, "gaps between recorded arrivals are not used (--arrivals closed)"
    if config.requests.request_rate == math.inf:
        yield "burstiness", "all requests come at once"
    if config.requests.num_requests is not None:
        yield "duration", "num_requests says how many requests are measured"
    if config.requests.chooses_part and config.requests.request_rate == math.inf:
        yield "warmup", "all requests come at once"
    if config.requests.log_to is not None and not config.requests.log_from:
        yield "warmup", "nothing comes before the begin of the log"
    if not config.engine.enable_prefix_caching and not config.cluster.n_prefill:
        for name in ("prompts", "num_prefixes"):
            yield name, "no worker keeps a prefix (enable_prefix_caching)"


def _of_faults(config: RunConfig, record: RunRecord) -> _Found:
    kinds = {fault.kind for fault in record.faults}
    if record.retries is None:
        for name in ("health_delay_ms", "retry", "max_retries", "user_retry_s"):
            yield name, "nothing fails (--fail, --events)"
    if not kinds & {"fail", "hang"} and record.states is None:
        yield "health_delay_ms", "no worker dies or hangs"
    if not kinds & {"fail", "hang", "drain", "join"} and record.states is None:
        for name in ("retry", "max_retries", "user_retry_s"):
            yield name, "no worker dies"
    if config.faults.retry == "never":
        yield "max_retries", "retry is never"


def _of_scaling(config: RunConfig) -> _Found:
    elastic = any(pool.is_elastic for pool in config.pools)
    if not elastic:
        yield "width_pause", "no group changes its width (--enable-elastic-ep)"
    if not config.scaling.scales:
        for name in ("start_up", "prefill.start_up", "decode.start_up"):
            yield name, "no worker is started (--autoscale)"
        for name in ScalingConfig.model_fields:
            if not (elastic and name == "min_workers"):  # which says what a GPU holds
                yield name, "there is no autoscaler (--autoscale)"
    rule = parse(config.scaling.autoscale, "autoscale").name
    least = config.scaling.least_workers(config.pools)
    if rule != "none" and all(least[pool.name] >= pool.units[0] for pool in config.pools):
        why = f"--topology is the maximum, and {config.cluster.topology} has no worker to start"
        yield "autoscale", f"{why} or stop beyond --min-workers; give a larger one, such as 8C"
    if rule in _BEGIN:
        yield "initial_workers", f"{rule} says how many there are"
    if rule == "none":
        for name in ("metric_delay", "drain_timeout"):
            yield name, "the number of workers stays (--autoscale none)"
    if rule in (*_BEGIN, *_BY_METRICS):
        yield "demand", f"{rule} counts no requests"
    if rule in (*_BEGIN, *_BY_METRICS, "dynamo_load", "dynamo_throughput"):
        yield "switch_time", f"{rule} switches no worker"
    if (
        config.scaling.drain_timeout is None
        and not config.faults.fail
        and config.faults.events is None
    ):
        for name in ("retry", "max_retries", "user_retry_s"):
            yield name, "no worker leaves before its requests have ended (--drain-timeout)"
    if len({pool.name for pool in config.pools}) == 1:
        yield "switch_time", f"{config.cluster.topology} has no other pool to switch to"


def _late_faults(config: RunConfig, record: RunRecord) -> list[str]:
    """Name faults that come when the run has ended; until one joins a worker is missing."""
    own = {str(in_cluster(parse_fail(text), config.pools)): text for text in config.faults.fail}
    return [
        f"{f'fail {own[str(fault)]}' if str(fault) in own else f'events: {fault}'} has no effect: "
        f"the run ends at {record.end_s:.3g} s"
        for fault in record.faults
        if fault.kind != "join" and fault.at_s > record.end_s
    ]


def _of_tables(config: RunConfig, prepared: PreparedRun) -> list[str]:
    """Name the user's tables that no lookup has found: of other models, types or kernels."""
    names = dict.fromkeys(table_name(table.metadata) for table in load_tables(config.steps.tables))
    unused = [name for name in names if name not in prepared.tables_used]
    if names and len(unused) == len(names):
        few = ", ".join(unused[:3]) + (", ..." if unused[3:] else "")
        why = f"no kernel of {prepared.model.name} here is like {few}"
        return [f"tables {config.steps.tables} has no effect: {why}"]
    return [f"tables: {name} has no effect: no kernel of this run is like it" for name in unused]
