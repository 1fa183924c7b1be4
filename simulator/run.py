"""From a configuration to a result: the steps of one run, in order."""

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache, partial
from importlib.metadata import version
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.jit import is_cold
from eldr_sim.news import heard, tell
from eldr_sim.policies.base import PolicyContext, RouterPolicy
from eldr_sim.policies.choice import SignatureParameters
from eldr_sim.policies.eldr.artifact import RoutingArtifact, cached_fit
from eldr_sim.policies.eldr.signature import FitOptions, score_of
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.queue.orders import QueueOrder, Waiting
from eldr_sim.policies.registry import (
    autoscaler,
    begins_as_configured,
    decode_policy,
    is_built_in,
    needs,
    parameters,
    prefill_policy,
    queue_order,
    replica_choice,
)
from eldr_sim.policies.scaling.metrics import per_pool
from eldr_sim.simulator.control import placing
from eldr_sim.simulator.control.autoscaling import Autoscaling, ScalingRule, check_budget
from eldr_sim.simulator.control.cluster import Cluster
from eldr_sim.simulator.control.control import Control
from eldr_sim.simulator.control.inputs import Inputs, Signatures
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.control.relocation import Relocations
from eldr_sim.simulator.control.replica_policy import ReplicaPolicy
from eldr_sim.simulator.outcome.catalogue import Headline, Shown, headline_tags, label, number
from eldr_sim.simulator.outcome.metrics import slo_blocks
from eldr_sim.simulator.outcome.summary import summary_of
from eldr_sim.simulator.outcome.tables import requests_table, step_tables
from eldr_sim.simulator.plane.steps.group_state import ASKED
from eldr_sim.simulator.reference.cluster import ReferenceCluster
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, PoolSpec
from eldr_sim.simulator.setup.config.fault_spellings import planned
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.log_part import check_window, log_of, part_of
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.fault_plan import FaultPlan
from eldr_sim.simulator.setup.mean_work import MeanWork, scaling_facts
from eldr_sim.simulator.setup.prepare import PreparedRun, RoutingNeeded, prepare
from eldr_sim.simulator.setup.replay import (
    Replay,
    make_replicas,
    no_replay,
    prompt_rows,
    rank_masks,
    replay_of,
)
from eldr_sim.simulator.setup.run_routing import texts_of
from eldr_sim.simulator.setup.shared_experts import hold_instances
from eldr_sim.simulator.setup.streaming import work_of
from eldr_sim.traces.prompts import PromptSignatures, no_signatures
from eldr_sim.traces.requests.load import Load
from eldr_sim.traces.requests.logs.log_window import describe_part
from eldr_sim.traces.requests.requests import make_requests
from eldr_sim.traces.requests.session_shape import PRESETS as SESSIONS
from eldr_sim.traces.requests.session_shape import session_shape
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import PromptScore
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload, join_routing

#: What runs a cluster: compiled code, or the same as SimPy processes.
Backend = Literal["compiled", "simpy", "vllm"]
#: Arrivals go on for this many measured windows after the warm-up, so that the requests measured
#: last still see the load; the run stops when they have ended.
_WINDOWS_OF_ARRIVALS = 2.0
#: A run gives up when the measured requests have not ended after so many times its length.
_TIME_LIMIT_FACTOR = 20.0


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """What a run leaves behind: ``summary.json``, two tables and ``config.json``; ``record``: what
    happened; ``domains``: of the workload."""

    summary: dict[str, Any]
    config: dict[str, Any]
    record: RunRecord
    domains: list[str]
    n_moe_layers: int

    def headline(self) -> Headline:
        """Return a few figures of the run."""
        s = self.summary
        alone = s["policy"] is None  # requests end with their prompts
        router = s["prefill_policy"] if alone else s["policy"]
        title = f"{router} on {s['topology']}: {s['model_id']} on {s['gpu']}"
        tags = ("completed", "failed", *headline_tags(alone))
        return Headline(title, ("figure", "value"), [(label(tag), number(s[tag])) for tag in tags])

    @cached_property
    def requests(self) -> pa.Table:
        """A row a request, see `tables.requests_table`."""
        return requests_table(self.record, self.domains)

    @cached_property
    def steps(self) -> pa.Table:
        """A row a step, see `tables.step_tables`."""
        return pa.concat_tables(self.step_tables())

    def step_tables(self) -> Iterator[pa.Table]:
        """Yield the rows of `steps` in parts."""
        return step_tables(self.record, self.n_moe_layers)


def simulate(
    config: RunConfig,
    progress: Callable[[float], None] | None = None,
    *,
    backend: Backend = "compiled",
    workers: Mapping[str, type[Any]] | None = None,
) -> Result:
    """Run one configuration; raises InputError if something in it does not exist or fit.

    ``progress``: called with the share of measured requests that have ended, 0 to 1; ``backend``:
    ``compiled``; ``simpy``, the reference model, equal and slower; or ``vllm``, the reference model
    with the installed vLLM's scheduler in each worker; ``workers``: for ``simpy``, the class of a
    pool's workers, by the pool's name (docs/change_engine.md)."""
    return result_of(config, *_run(config, progress, backend, workers), backend=backend)


def result_of(
    config: RunConfig,
    prepared: PreparedRun,
    workload: Workload,
    record: RunRecord,
    *,
    backend: Backend = "compiled",
) -> Result:
    """Return the result of a run that has happened."""
    return Result(
        summary=summary_of(config, prepared, workload, record),
        config=_run_again(config, prepared.trace, backend),
        record=record,
        domains=texts_of(config, prepared.trace).domains,
        n_moe_layers=prepared.model.n_moe_layers,
    )


def simulate_summary(config: RunConfig) -> dict[str, Any]:
    """Run one configuration for its ``summary.json``, with ``slo_blocks`` of a log."""
    prepared, workload, record = _run(config, None)
    summary = summary_of(config, prepared, workload, record)
    if "log_window" in workload.description and config.output.goodput.given:
        summary["slo_blocks"] = slo_blocks(record, config.output.goodput)
    return summary


def _run(
    config: RunConfig,
    progress: Callable[[float], None] | None,
    backend: Backend = "compiled",
    workers: Mapping[str, type[Any]] | None = None,
) -> tuple[PreparedRun, Workload, RunRecord]:
    prepared = prepare_run(config)
    workload, window = offered_load(config, prepared.trace)
    inputs = make_inputs(config, prepared, workload, window)
    if backend != "compiled":
        reference = reference_of(config, inputs, workers, backend=backend)
        return replace(prepared, spec=inputs.spec), workload, reference.run(progress)
    if workers:
        raise InputError("workers", "the compiled engines are not replaced", "backend simpy")
    cluster = Cluster(inputs)
    tell_of_compiling()
    if not config.scaling.scales:
        return replace(prepared, spec=cluster.spec), workload, cluster.run(progress)
    control = Control(cluster, fault_plan(config, cluster))
    autoscale(config, prepared, workload, control)
    record = control.recorded(cluster.run(progress, control.acts))
    return replace(prepared, spec=cluster.spec), workload, record


def prepare_run(config: RunConfig) -> PreparedRun:
    """Return what a run reads; what its requests, policies, faults and autoscaler are refused for
    is found before routing is drawn."""
    return prepare(config, partial(_check_without_routing, config))


def _check_without_routing(config: RunConfig, prepared: PreparedRun) -> None:
    """Raise InputError where a run is refused for something that needs no routing."""
    _check_scaling(config)
    workload, _ = offered_load(config, None)
    planned(config, prepared.spec, workload)
    _queue_order(config, prepared)
    if config.cluster.n_prefill:
        _prefill_policy(config, prepared, workload)
    if not config.cluster.generates:
        return
    calibration = partial(_calibration_of, config, prepared)
    clusters = False
    for router in range(1 if config.cluster.n_prefill else 0, len(prepared.spec.routers)):
        try:
            policy = _decode_policy(config, prepared, workload, no_replay(), calibration, router)
            clusters = policy.artifact is not None
        except RoutingNeeded as needed:  # another package's policy may read them in any order
            clusters = needed.fits or not is_built_in("decode", config.policies.policy)
    placing.check_placements(config, prepared, clusters)
    if not config.cluster.n_prefill and needs("policy", config.policies.policy).signature:
        _refuse_signatures(config)


def _check_scaling(config: RunConfig) -> None:
    """Raise InputError for bounds of an autoscaler that do not fit the pools."""
    if not config.scaling.scales:
        return
    if config.faults.fail or config.faults.events:
        problem = "workers that fail beside an autoscaler are not simulated"
        raise InputError("autoscale", problem, "none, or neither fail nor events")
    names = [pool.name for pool in config.pools]
    initial = per_pool("initial_workers", config.scaling.initial_workers, names)
    least = per_pool("min_workers", config.scaling.min_workers or (1,), names)
    for field, given in (("min_workers", least), ("initial_workers", initial)):
        for pool in config.pools:
            if given.get(pool.name, 0) > pool.units[0]:
                problem = f"{given[pool.name]} {pool.name} workers"
                raise InputError(field, problem, f"up to the topology's {pool.units[0]}")
    own = begins_as_configured(config.scaling.autoscale)
    used = 0
    for pool in config.pools:
        most, gpus = pool.units
        n = initial.get(pool.name, most) if own else 0
        used += max(n, least.get(pool.name, 0)) * gpus
    check_budget(config.scaling.gpu_budget, used)


def reference_of(
    config: RunConfig,
    inputs: Inputs,
    workers: Mapping[str, type[Any]] | None,
    arrivals: bool = True,
    *,
    backend: Backend = "simpy",
) -> ReferenceCluster:
    """Return a run as SimPy processes; raises InputError for what these do not model."""
    if config.scaling.scales:
        raise InputError("autoscale", "the SimPy backend does not model it", "--backend compiled")
    if backend == "vllm":
        from eldr_sim.simulator.engine_code.vllm import vllm_workers

        if workers:
            raise InputError("workers", "beside vLLM's scheduler", "backend simpy")
        workers = vllm_workers(inputs)
    return ReferenceCluster(inputs, workers, arrivals)


def fault_plan(config: RunConfig, cluster: Cluster | ReferenceCluster) -> FaultPlan:
    """Return what goes wrong in a cluster, and what its routers do about workers that leave."""
    health = config.faults.health_delay_ms / 1e3
    return cluster.faults or FaultPlan(
        health_delay_s=health, retry=config.faults.retry, max_retries=config.faults.max_retries,
        user_retry_s=config.faults.user_retry_s,
    )  # fmt: skip


def autoscale(
    config: RunConfig, prepared: PreparedRun, workload: Workload, control: Control
) -> None:
    """Let the autoscaler of a configuration work on a cluster, if there is one."""
    if not config.scaling.scales:
        return
    _check_scaling(config)
    works = [_works(config, prepared, control.cluster, pool) for pool in prepared.spec.pools]
    pauses = {name: group.pause_between for name, group in control.cluster.elastic.items()}
    facts = scaling_facts(config, prepared, workload, works, pauses)
    rng = stream(config.requests.seed, "autoscaler")
    policy = autoscaler(config.scaling.autoscale, PolicyContext(1, rng, scaling=facts))
    names = [pool.name for pool in facts.pools]
    rule = ScalingRule(
        per_pool("min_workers", config.scaling.min_workers or (1,), names),
        per_pool("initial_workers", config.scaling.initial_workers, names),
        config.scaling.gpu_budget,
        config.scaling.demand == "exit",
        config.scaling.metric_delay,
        math.inf if config.scaling.drain_timeout is None else config.scaling.drain_timeout,
    )
    Autoscaling(control, policy, facts, rule)


def tell_of_compiling() -> None:
    """Tell who listens that the simulator is compiled now, if it is."""
    if heard() and is_cold():
        tell("compiling the simulator, once on this machine: a minute or two")


def offered_load(
    config: RunConfig, trace: RoutingTrace | None
) -> tuple[Workload, tuple[float, float]]:
    """Return the requests of a run and the window, s, in which those that count arrive."""
    warmup, duration = config.requests.warmup_s, config.requests.duration_s
    window = (warmup, np.inf if duration is None else warmup + duration)
    # The load of a day ends with it: what is left is served, and counts.
    windows = (
        1.0
        if config.requests.load is not None and config.requests.duration is None
        else _WINDOWS_OF_ARRIVALS
    )
    horizon = None if duration is None else warmup + windows * duration
    check_window(config)
    log = log_of(config)
    part = part_of(config, log)
    if part is not None and config.requests.chooses_part:
        window = part.window
    if config.requests.arrivals == "agentx":
        horizon = None
    same = {field.name for field in fields(Load)} & set(RUN_FIELDS)
    values: dict[str, Any] = {name: config.value(name) for name in same}
    values["request_rate"] = config.requests.effective_rate
    values["output_len"] = config.effective_output_len
    if config.requests.n_sessions is not None:
        values["num_requests"] = config.requests.n_sessions
    ratio = config.requests.random_range_ratio
    load = Load(
        **values,
        horizon_s=horizon,
        lanes_s=0.0 if duration is None else duration,
        drift_s=None if duration is None else window[1],
        # Requests that end with their prompts have one output token, whatever the range.
        range_ratios=(ratio, ratio if config.cluster.generates else 0.0),
        part=part,
        session=session_shape(
            config.requests.workload,
            config.engine.block_size,
            config.requests.history,
            **{name: config.value(name) for name in SESSIONS["chat"]},
        ),
    )
    try:
        requests = make_requests(texts_of(config, trace), load)
    except InputError as error:
        if error.field != "horizon_s":
            raise
        allowed = error.allowed.replace("horizon", "duration")
        raise InputError("duration", error.problem, allowed) from None
    workload = join_routing(
        requests, trace, trace_replay=config.routing.trace_replay, seed=config.requests.seed
    )
    arrivals = workload.arrival_s
    if not ((arrivals >= window[0]) & (arrivals < window[1])).any():
        raise InputError(
            "warmup" if config.requests.duration is None else "duration",
            f"none of {len(arrivals)} requests arrives in the measured window "
            f"[{window[0]:g} s, {window[1]:g} s)",
            "a shorter warm-up, a longer duration or a higher rate",
        )
    if log is not None:
        measured = describe_part(log, arrivals, window, part, config.requests.request_rate)
        workload = replace(workload, description=workload.description | {"log_window": measured})
    return workload, window


def make_inputs(
    config: RunConfig,
    prepared: PreparedRun,
    workload: Workload,
    window: tuple[float, float],
    on_blocks: Callable[[int, Sequence[int], Sequence[int]], None] | None = None,
) -> Inputs:
    """Put what a cluster runs together, policies fitted; ``on_blocks``: see `control.inputs`."""
    trace, model, spec = prepared.trace, prepared.model, prepared.spec
    calibration = partial(_calibration_of, config, prepared)
    replay = no_replay()
    if trace is not None:
        windows = workload.decode_request.astype(np.int64)
        replay = replay_of(trace, model.top_k, model.n_moe_layers, windows)
    policies = [
        _prefill_policy(config, prepared, workload)
        if number == 0 and config.cluster.n_prefill
        else _decode_policy(config, prepared, workload, replay, calibration, number)
        for number in range(len(spec.routers))
    ]
    decode = policies[-1] if config.cluster.generates else None
    if not config.cluster.n_prefill:
        _check_colocated(config, decode)
    order = _queue_order(config, prepared)
    score = None if decode is None else decode.needs.signature
    if score == "count":
        _routed(prepared).require_prompts(f"the signatures of policy {config.policies.policy!r}")
    signatures: Signatures = no_signatures
    if trace is not None:
        texts = np.union1d(workload.text, workload.prefix_text)
        signatures = PromptSignatures(trace, score or "count", texts)
    spec = replace(
        spec if score is None else _with_signatures(spec, config.policies.policy),
        preempt_by_key=order.preempts,
        aging_s=order.aging_s,
    )
    artifact = None if decode is None else decode.artifact
    placements, movable = placing.placements_of(config, prepared, artifact, calibration)
    if placements is not None:
        pools = []
        for pool in spec.pools:
            own = [placements[w] for w in spec.workers_of(pool.name)]
            pools.append(pool._replace(engine=hold_instances(config, model, pool.engine, own)))
        spec = replace(spec, pools=tuple(pools))
    relocations = placing.relocations_of(config, prepared, movable)
    elastic = placing.elastic_groups(config, prepared, artifact, calibration)
    most = [each.most_instances() for each in elastic]
    last_arrival = float(workload.arrival_s[-1])
    return Inputs(
        spec,
        [pool.engine.parallelism.shard(model) for pool in spec.pools],
        workload,
        replay,
        signatures,
        policies,
        window,
        time_limit_s=np.inf
        if config.requests.num_requests and not config.scaling.scales
        else _TIME_LIMIT_FACTOR * max(last_arrival, window[1]),
        expert_masks=None
        if placements is None
        else rank_masks(placements, model.n_experts, model.n_moe_layers),
        placements=placements,
        replicas=None
        if placements is None
        else make_replicas(
            placements,
            model.n_experts,
            model.n_moe_layers,
            most=max([1, *most]) if relocations is None else relocations.most_instances,
        ),
        prompts=prompt_rows(trace, workload) if trace is not None and trace.has_prompts else None,
        queue_keys=_queue_keys(order, workload),
        relocations=relocations,
        faults=planned(config, spec, workload),
        replica_policy=_replica_policy(config, prepared, placements, relocations),
        elastic=elastic,
        on_blocks=on_blocks,
    )


def build_cluster(
    config: RunConfig, prepared: PreparedRun, workload: Workload, window: tuple[float, float]
) -> Cluster:
    """Return the compiled cluster of a run, policies fitted."""
    return Cluster(make_inputs(config, prepared, workload, window))


def _queue_order(config: RunConfig, prepared: PreparedRun) -> QueueOrder:
    rng, n_workers = stream(config.requests.seed, "queue order"), len(prepared.spec.routers[-1])
    context = PolicyContext(n_workers, rng, step_times=prepared.step_time.unpadded)
    return queue_order(config.policies.queue_order, context)


def _prefill_policy(config: RunConfig, prepared: PreparedRun, workload: Workload) -> RouterPolicy:
    """Build the policy of the router that requests come to, where others go on with them."""
    spec = prepared.spec
    context = PolicyContext(
        n_workers=len(spec.routers[0]),
        rng=stream(config.requests.seed, "prefill policy"),
        prefix_block_tokens=workload.prefix_block_tokens or config.engine.block_size,
        prefill_work=lambda: work_of(prepared.model, spec.prefill),
        step_times=spec.prefill.step_time.unpadded,
        token_budget=spec.prefill.max_num_batched_tokens,
    )
    return prefill_policy(config.policies.prefill_policy, context)


def _replica_policy(
    config: RunConfig,
    prepared: PreparedRun,
    placements: list[Placement] | None,
    relocations: Relocations | None,
) -> ReplicaPolicy | None:
    """Return what asks a choice of replicas of another package; None where it is compiled."""
    groups = [e.group for e in (prepared.spec.decode, prepared.spec.prefill) if e.group is not None]
    if placements is None or not groups or groups[0].replica_choice != ASKED:
        return None
    rng = stream(config.requests.seed, "replica choice")
    context = PolicyContext(1, rng, rank_moe=groups[0].moe)
    choice = replica_choice(config.policies.replica_choice, context)
    return ReplicaPolicy(choice, placements, relocations)


def _decode_policy(
    config: RunConfig,
    prepared: PreparedRun,
    workload: Workload,
    replay: Replay,
    calibration: Callable[[], CalibrationSet],
    router: int,
) -> RouterPolicy:
    """Build a router's decode policy, and fit it if it needs a fit."""
    pools = [pool for pool in prepared.spec.pools if pool.router == router]
    engine, n_engines = pools[0].engine, len(prepared.spec.routers[router])
    step_time, shared = engine.step_time, engine.group
    alike = all(pool.engine.step_time is step_time for pool in pools)
    group_size = engine.parallelism.data_parallel_size
    if any(pool.engine.parallelism.data_parallel_size != group_size for pool in pools):
        problem = f"{', '.join(pool.name for pool in pools)} have groups of different sizes"
        raise InputError("data_parallel_size", problem, "one size behind a router")
    spread = engine.parallelism.n_expert_ranks > 1
    load, mix = config.requests, _mix(config)

    def artifact(options: FitOptions, n_clusters: int) -> RoutingArtifact:
        return _fit(
            _routed(prepared, fits=True), load.workload, mix, n_clusters, load.seed, options
        )

    def future(request: int) -> Floats:
        window, offset, steps = (
            int(column[request])
            for column in (workload.decode_request, workload.replay_offset, workload.output_len)
        )
        return replay.activation(window, offset, steps, step_time.n_experts)

    def placements() -> list[Placement]:
        _routed(prepared)
        placed = [
            placing.place_pool(config, prepared, pool.name, None, calibration) for pool in pools
        ]
        return [one.placement for pool in placed for one in pool]

    return decode_policy(
        config.policies.policy,
        PolicyContext(
            n_workers=n_engines,
            rng=stream(config.requests.seed, "decode policy"),
            calibration=calibration,
            artifact=artifact,
            step_times=step_time.unpadded if alike else None,
            future=None if prepared.model.is_dense else future,
            group_size=group_size,
            rank_moe=None if shared is None else shared.moe,
            placements=placements if spread and not engine.elastic else None,
            computes_prompts=router == 0,
            tokens_per_step=1 + (0 if engine.speculation is None else engine.speculation.k),
            token_budget=engine.max_num_batched_tokens,
            kv_token_s=_kv_token_s(prepared, pools[0]),
        ),
    )


def _kv_token_s(prepared: PreparedRun, pool: PoolSpec) -> float:
    """Return the seconds that a token's KV cache takes to a worker of a pool, alone on its link."""
    transfer = pool.transfer or prepared.spec.transfer
    n_bytes = pool.engine.parallelism.shard(prepared.model).kv_bytes_per_token
    return n_bytes / min(transfer.bandwidth, transfer.ingress)


def _mix(config: RunConfig) -> tuple[tuple[str, float], ...] | None:
    mix = config.routing.domain_mix
    return None if mix is None else tuple(mix.items())


def _calibration_of(config: RunConfig, prepared: PreparedRun) -> CalibrationSet:
    return _calibration(_routed(prepared), config.requests.workload, _mix(config), "count")


def _routed(prepared: PreparedRun, fits: bool = False) -> RoutingTrace:
    """Return the trace, which runs of policies that declare that they need routing have."""
    if prepared.trace is None and not prepared.model.is_dense:
        raise RoutingNeeded(fits)
    if prepared.trace is None:
        raise InputError("policy", f"it needs experts, and {prepared.model.name} is dense")
    return prepared.trace


def _with_signatures(spec: ClusterSpec, policy: str) -> ClusterSpec:
    """Return the cluster with what signatures cost its decode policy."""
    costs = parameters("decode", policy)
    if not isinstance(costs, SignatureParameters):  # another package's, without own figures
        costs = SignatureParameters()
    return replace(
        spec, capture_s=costs.capture_overhead_ms / 1e3, routing_s=costs.routing_overhead_ms / 1e3
    )


def _queue_keys(order: QueueOrder, workload: Workload) -> Floats:
    priority = workload.priority
    waiting = Waiting(
        workload.prompt_len.astype(np.int64),
        None if priority is None else priority.astype(np.int64),
        workload.output_len.astype(np.int64),
    )
    keys = np.asarray(order.keys(waiting), np.float64)
    if keys.shape != workload.prompt_len.shape or np.isnan(keys).any():
        raise ValueError(f"queue order {order.name!r} gives no key to each request")
    return keys


@lru_cache(maxsize=8)
def _calibration(
    trace: RoutingTrace,
    workload: str,
    domain_mix: tuple[tuple[str, float], ...] | None,
    score: PromptScore,
    at_least: int = 1,
) -> CalibrationSet:
    """Pick calibration requests; those picked before are not read again by this process."""
    mix = None if domain_mix is None else dict(domain_mix)
    return calibration_set(trace, workload=workload, domain_mix=mix, score=score, at_least=at_least)


@lru_cache(maxsize=16)
def _fit(
    trace: RoutingTrace,
    workload: str,
    domain_mix: tuple[tuple[str, float], ...] | None,
    n_decoders: int,
    seed: int,
    options: FitOptions,
) -> RoutingArtifact:
    """Fit ELDR's router; a sweep's points differ in what no fit depends on, such as the rate."""
    return cached_fit(
        trace,
        workload,
        None if domain_mix is None else dict(domain_mix),
        lambda: _calibration(trace, workload, domain_mix, score_of(options.transform), n_decoders),
        n_decoders,
        seed,
        options,
    )


def _check_colocated(config: RunConfig, policy: RouterPolicy | None) -> None:
    if policy is not None and policy.needs.signature is not None:
        _refuse_signatures(config)


def _refuse_signatures(config: RunConfig) -> NoReturn:
    raise InputError(
        "policy",
        f"{config.policies.policy!r} reads expert signatures, which no prefill has made when a "
        "request arrives at co-located workers",
        "a policy that needs none, such as jsq, or a topology such as 8P16D",
    )


def placement_of(config: RunConfig, prepared: PreparedRun, name: str) -> Placement:
    """Return a pool's first placement, before any move; raises InputError for ELDR's."""
    calibration = partial(_calibration_of, config, prepared)
    return placing.place_pool(config, prepared, name, None, calibration)[0].placement


def mean_work(config: RunConfig, prepared: PreparedRun, pool: int) -> MeanWork:
    """Return the mean work of a pool's groups, linear ones where ELDR's fit is asked for."""
    spec, trace = prepared.spec.pools[pool], prepared.trace
    assert trace is not None, "dense models share no experts"
    try:
        placement = placement_of(config, prepared, spec.name)
    except InputError:
        linear = {role: {"expert_placement": "linear"} for role in ("prefill", "decode")}
        placement = placement_of(config.replace(**linear), prepared, spec.name)
    return MeanWork(spec.engine, placement, trace, pool == 0)


def _works(
    config: RunConfig, prepared: PreparedRun, cluster: Cluster, pool: PoolSpec
) -> dict[int, Callable[[], MeanWork]]:
    """Return who tells a pool's mean work, by the engines that are there; {} without groups."""
    engine, own, trace = pool.engine, cluster.elastic.get(pool.name), prepared.trace
    if engine.group is None:
        return {}
    width = engine.parallelism.data_parallel_size
    if own is None:
        number = prepared.spec.names.index(pool.name)
        return {width: cache(partial(mean_work, config, prepared, number))}
    assert trace is not None, "dense models share no experts"
    found: dict[int, Callable[[], MeanWork]] = {}
    for width, shape in own.shapes.items():
        layout = replace(engine.parallelism, data_parallel_size=width)
        narrow = replace(engine, parallelism=layout, group=shape.cost)
        found[width] = cache(partial(MeanWork, narrow, shape.placement, trace, own.pool == 0))
    return found


def _run_again(config: RunConfig, trace: RoutingTrace | None, backend: Backend) -> dict[str, Any]:
    engine = {}
    if backend == "vllm":
        from eldr_sim.simulator.engine_code.vllm import vllm_version

        engine["vllm"] = vllm_version()
    return {
        "config": config.model_dump(mode="json"),
        "trace_checksum": None if trace is None else trace.manifest.checksum,
        "versions": {"python": platform.python_version()} | _versions() | engine,
    }


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("eldr-sim", "numpy", "numba", "simpy", "pyarrow")}
