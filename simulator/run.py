"""From a configuration to a result: the steps of one run, in order."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eldr_sim.compiling import tell_of_compiling
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.lazy import Lazy
from eldr_sim.policies.registry import is_built_in, needs
from eldr_sim.simulator.control import placing
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.control_api import Control
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.control.run_inputs import RunInputs, Signatures
from eldr_sim.simulator.control.run_policies import RunPolicies, queue_keys
from eldr_sim.simulator.control.scaling import autoscale, check_scaling, expected_step
from eldr_sim.simulator.outcome.catalogue import Headline, Shown, headline_tags, label, number
from eldr_sim.simulator.outcome.metrics import slo_blocks
from eldr_sim.simulator.outcome.summary import judged, summary_of
from eldr_sim.simulator.outcome.tables import requests_table, step_tables
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
from eldr_sim.simulator.setup.config.fault_spellings import planned
from eldr_sim.simulator.setup.config.groups import OutputConfig
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.expected_step import ExpectedStep
from eldr_sim.simulator.setup.fault_plan import FaultPlan
from eldr_sim.simulator.setup.offered_load import make_load
from eldr_sim.simulator.setup.prepare import PreparedRun, RoutingNeeded, prepare, trace_of
from eldr_sim.simulator.setup.replay import (
    make_replicas,
    no_replay,
    prompt_rows,
    rank_masks,
    replay_of,
)
from eldr_sim.simulator.setup.run_routing import texts_of
from eldr_sim.simulator.setup.shared_experts import hold_instances, sharing
from eldr_sim.traces.prompts import PromptSignatures, no_signatures
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload

if TYPE_CHECKING:
    import pyarrow as pa

    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster
else:
    pa = Lazy("pyarrow")

#: What runs a cluster: compiled code, or the same as SimPy processes.
Backend = Literal["compiled", "simpy", "vllm", "sglang"]
#: A run gives up when the measured requests have not ended after this many times its length.
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
    """Run one configuration.

    Args:
        config: the run.
        progress: called with the share of measured requests that have ended, 0 to 1.
        backend: ``compiled``; ``simpy``, the reference model, equal and slower; or ``vllm`` or
            ``sglang``, the reference model with the installed engine's scheduler in each worker.
        workers: for ``simpy``, the class of a pool's workers by the pool's name (docs/engines.md).

    Returns:
        Summary, requests and steps.

    Raises:
        InputError: something in the configuration does not exist or does not fit.
    """
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
        domains=texts_of(config.requests.workload, config.routing, prepared.trace).domains,
        n_moe_layers=prepared.model.n_moe_layers,
    )


def simulate_summary(config: RunConfig) -> dict[str, Any]:
    """Run one configuration for its ``summary.json``, with ``slo_blocks`` of a log."""
    prepared, workload, record = _run(config, None)
    summary = summary_of(config, prepared, workload, record)
    if "log_window" in workload.description and config.output.goodput.given:
        summary["slo_blocks"] = slo_blocks(record, judged(config, prepared, record).output.goodput)
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
        raise InputError("workers", "compiled engines cannot be replaced", "backend simpy")
    cluster = CompiledCluster(inputs)
    tell_of_compiling()
    if not config.scaling.scales:
        return replace(prepared, spec=cluster.spec), workload, cluster.run(progress)
    control = Control(cluster, fault_plan(config, cluster))
    scale(config, prepared, workload, control)
    record = control.recorded(cluster.run(progress, control.acts))
    return replace(prepared, spec=cluster.spec), workload, record


def prepare_run(config: RunConfig) -> PreparedRun:
    """Return what a run reads; what its requests, policies, faults and autoscaler are refused for
    is found before routing is drawn."""
    _check_objective(config.output)
    return prepare(config, partial(_check_without_routing, config))


class _Checked(Exception):
    """All that is checked without routing has been checked."""


def check_run(config: RunConfig) -> None:
    """Raise InputError for what a run would be refused for, without drawing its routing."""

    def check(prepared: PreparedRun) -> None:
        _check_without_routing(config, prepared)
        raise _Checked

    _check_objective(config.output)
    with suppress(_Checked):
        prepare(config, check)


def _check_objective(output: OutputConfig) -> None:
    if output.confidence is not None and not output.goodput.given:
        raise InputError("confidence", "no objective is judged", "--goodput ttft:500,tpot:30")


def _check_without_routing(config: RunConfig, prepared: PreparedRun) -> None:
    """Raise InputError where a run is refused for something that needs no routing."""
    check_scaling(config.scaling, config.faults, config.pools)
    placing.check_relocations(config.experts, prepared.spec)
    workload, _ = offered_load(config, None)
    _faults(config, prepared.spec, workload)
    policies = policies_of(config, prepared)
    queue_keys(policies.queue_order(), workload)
    if config.cluster.n_prefill:
        policies.prefill(workload)
    if not config.cluster.generates:
        return
    clusters = False
    for router in range(1 if config.cluster.n_prefill else 0, len(prepared.spec.routers)):
        try:
            policy = policies.decode(workload, no_replay(), router)
            clusters = policy.artifact is not None
        except RoutingNeeded as needed:  # another package's policy may read them in any order
            clusters = needed.fits or not is_built_in("decode", config.policies.policy)
    placing.check_placements(prepared, config.requests.seed, clusters)
    if not config.cluster.n_prefill and needs("policy", config.policies.policy).signature:
        raise policies.refuse_signatures()


def reference_of(
    config: RunConfig,
    inputs: RunInputs,
    workers: Mapping[str, type[Any]] | None,
    arrivals: bool = True,
    *,
    backend: Backend = "simpy",
) -> ReferenceCluster:
    """Return a run as SimPy processes; raises InputError for what these do not model."""
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster

    if config.scaling.scales:
        raise InputError("autoscale", "the SimPy backend does not model it", "--backend compiled")
    if backend != "simpy":
        if workers:
            raise InputError("workers", "given together with an engine's code", "backend simpy")
        workers = _engine_code(backend).workers(inputs)
    return ReferenceCluster(inputs, workers, arrivals)


def _engine_code(backend: Backend) -> Any:
    return importlib.import_module(f"eldr_sim.simulator.engine_code.{backend}")


def fault_plan(config: RunConfig, cluster: CompiledCluster | ReferenceCluster) -> FaultPlan:
    """Return what goes wrong in a cluster, and what its routers do about workers that leave."""
    health = config.faults.health_delay_ms / 1e3
    return cluster.faults or FaultPlan(
        health_delay_s=health, retry=config.faults.retry, max_retries=config.faults.max_retries,
        user_retry_s=config.faults.user_retry_s,
    )  # fmt: skip


def scale(config: RunConfig, prepared: PreparedRun, workload: Workload, control: Control) -> None:
    """Let the autoscaler of a configuration work on a cluster, if there is one."""
    if config.scaling.scales:
        check_scaling(config.scaling, config.faults, config.pools)
        calibration = policies_of(config, prepared).calibration
        autoscale(
            config.scaling, config.pools, config.requests.seed, prepared, workload, calibration,
            control,
        )  # fmt: skip


def offered_load(
    config: RunConfig, trace: RoutingTrace | None
) -> tuple[Workload, tuple[float, float]]:
    """Return the requests of a run and the window, s, in which those that count arrive."""
    return make_load(
        config.requests, config.routing, config.effective_output_len, config.engine.block_size,
        trace, generates=config.cluster.generates,
    )  # fmt: skip


def load_of(config: RunConfig) -> tuple[Workload, tuple[float, float]]:
    """Return the requests that a configuration offers.

    Args:
        config: the run.

    Returns:
        The workload, and begin and end of the measured window, s.

    Raises:
        InputError: the workload does not exist or does not fit the trace.
    """
    return offered_load(config, trace_of(config, load_model(config.engine.model)))


def make_inputs(
    config: RunConfig,
    prepared: PreparedRun,
    workload: Workload,
    window: tuple[float, float],
    on_blocks: Callable[[int, Sequence[int], Sequence[int]], None] | None = None,
) -> RunInputs:
    """Put what a cluster runs together, policies fitted; ``on_blocks``: see `RunInputs`."""
    trace, model, spec = prepared.trace, prepared.model, prepared.spec
    made = policies_of(config, prepared)
    seed, calibration = config.requests.seed, made.calibration
    replay = no_replay()
    if trace is not None:
        windows = workload.decode_request.astype(np.int64)
        replay = replay_of(trace, model.top_k, model.n_moe_layers, windows)
    policies = [
        made.prefill(workload)
        if number == 0 and config.cluster.n_prefill
        else made.decode(workload, replay, number)
        for number in range(len(spec.routers))
    ]
    decode = policies[-1] if config.cluster.generates else None
    order = made.queue_order()
    score = None if decode is None else decode.needs.signature
    if score is not None and not config.cluster.n_prefill:
        raise made.refuse_signatures()
    if score == "count":
        made.trace().require_prompts(f"the signatures of policy {config.policies.policy!r}")
    signatures: Signatures = no_signatures
    if trace is not None:
        texts = np.union1d(workload.text, workload.prefix_text)
        signatures = PromptSignatures(trace, score or "count", texts)
    capture_s, routing_s = (0.0, 0.0) if score is None else made.signature_costs()
    spec = replace(
        spec,
        capture_s=capture_s,
        routing_s=routing_s,
        preempt_by_key=order.preempts,
        aging_s=order.aging_s,
    )
    artifact = None if decode is None else decode.artifact
    placing.check_relocations(config.experts, spec)
    placements, movable = placing.placements_of(prepared, seed, artifact, calibration)
    if placements is not None:
        pools = []
        for pool in spec.pools:
            own = [placements[w] for w in spec.workers_of(pool.name)]
            engine = hold_instances(
                config.policies.replica_choice, config.engine, spec.windows, model, pool.engine, own
            )
            pools.append(pool._replace(engine=engine))
        spec = replace(spec, pools=tuple(pools))
    relocations = placing.relocations_of(
        config.experts, config.policies.replica_choice, prepared, movable
    )
    share = partial(sharing, config.cluster, config.steps, config.policies.replica_choice, model)
    elastic = placing.elastic_groups(prepared, seed, config.scaling, share, artifact, calibration)
    most_instances = [each.most_instances() for each in elastic]
    last_arrival = float(workload.arrival_s[-1])
    return RunInputs(
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
            most=max([1, *most_instances]) if relocations is None else relocations.most_instances,
        ),
        prompts=prompt_rows(trace, workload) if trace is not None and trace.has_prompts else None,
        queue_keys=queue_keys(order, workload),
        relocations=relocations,
        faults=_faults(config, spec, workload),
        replica_policy=made.replica(placements, relocations),
        elastic=elastic,
        on_blocks=on_blocks,
    )


def build_cluster(
    config: RunConfig, prepared: PreparedRun, workload: Workload, window: tuple[float, float]
) -> CompiledCluster:
    """Return the compiled cluster of a run, policies fitted."""
    return CompiledCluster(make_inputs(config, prepared, workload, window))


def policies_of(config: RunConfig, prepared: PreparedRun) -> RunPolicies:
    """Return what builds the policies of a run."""
    return RunPolicies(config.policies, config.requests, config.routing, prepared)


def _faults(config: RunConfig, spec: ClusterSpec, workload: Workload) -> FaultPlan | None:
    moves = config.experts.eplb_interval is not None
    return planned(config.faults, config.requests.seed, spec, workload, moves=moves)


def expected_step_of(config: RunConfig, prepared: PreparedRun, pool: int) -> ExpectedStep:
    """Return the mean work of a pool's groups, linear ones where ELDR's fit is requested."""
    calibration = policies_of(config, prepared).calibration
    return expected_step(prepared, config.requests.seed, calibration, pool)


def _run_again(config: RunConfig, trace: RoutingTrace | None, backend: Backend) -> dict[str, Any]:
    engine = {}
    if backend not in ("compiled", "simpy"):
        engine[backend] = _engine_code(backend).version()
    return {
        "config": config.model_dump(mode="json"),
        "trace_checksum": None if trace is None else trace.manifest.checksum,
        "versions": {"python": platform.python_version()} | _versions() | engine,
    }


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("eldr-sim", "numpy", "numba", "simpy", "pyarrow")}
