"""The policies of a run: what each of them knows, and what it is fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext, RouterPolicy
from eldr_sim.policies.choice import SignatureParameters
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.queue.orders import QueueOrder, Waiting
from eldr_sim.policies.registry import (
    decode_policy,
    parameters,
    prefill_policy,
    queue_order,
    replica_choice,
)
from eldr_sim.simulator.control import placing
from eldr_sim.simulator.control.relocation import Relocations
from eldr_sim.simulator.control.replica_policy import ReplicaPolicy
from eldr_sim.simulator.plane.steps.group_state import ASKED
from eldr_sim.simulator.setup.cluster_spec import PoolSpec, work_of
from eldr_sim.simulator.setup.config.groups import PolicyConfig
from eldr_sim.simulator.setup.config.requests import RoutingConfig, WorkloadConfig
from eldr_sim.simulator.setup.prepare import PreparedRun, RoutingNeeded
from eldr_sim.simulator.setup.replay import Replay
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import PromptScore
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload

if TYPE_CHECKING:
    from eldr_sim.policies.eldr.artifact import RoutingArtifact
    from eldr_sim.policies.eldr.signature import FitOptions

#: Weights of a trace's domains; None: the workload's.
Mix = tuple[tuple[str, float], ...] | None


@dataclass(frozen=True)
class RunPolicies:
    """Builds the policies of a run from their words."""

    words: PolicyConfig
    load: WorkloadConfig
    routing: RoutingConfig
    prepared: PreparedRun

    @property
    def _mix(self) -> Mix:
        mix = self.routing.domain_mix
        return None if mix is None else tuple(mix.items())

    def trace(self, fits: bool = False) -> RoutingTrace:
        """Return the trace; raises InputError of a dense model, RoutingNeeded before drawing."""
        prepared = self.prepared
        if prepared.trace is None and not prepared.model.is_dense:
            raise RoutingNeeded(fits)
        if prepared.trace is None:
            raise InputError("policy", f"it needs experts, and {prepared.model.name} is dense")
        return prepared.trace

    def calibration(self) -> CalibrationSet:
        """Return the calibration requests that policies are fitted to."""
        return _calibration(self.trace(), self.load.workload, self._mix, "count")

    def _artifact(self, options: FitOptions, n_clusters: int) -> RoutingArtifact:
        load, trace = self.load, self.trace(fits=True)
        return _fit(trace, load.workload, self._mix, n_clusters, load.seed, options)

    def queue_order(self) -> QueueOrder:
        """Return the order in which engines admit requests."""
        rng, spec = stream(self.load.seed, "queue order"), self.prepared.spec
        step_times = self.prepared.step_time.unpadded
        context = PolicyContext(len(spec.routers[-1]), rng, step_times=step_times)
        return queue_order(self.words.queue_order, context)

    def prefill(self, workload: Workload) -> RouterPolicy:
        """Return the policy of the router that requests come to, where others decode them."""
        spec = self.prepared.spec
        context = PolicyContext(
            n_workers=len(spec.routers[0]),
            rng=stream(self.load.seed, "prefill policy"),
            prefix_block_tokens=workload.prefix_block_tokens or spec.block_size,
            prefill_work=lambda: work_of(self.prepared.model, spec.prefill),
            step_times=spec.prefill.step_time.unpadded,
            token_budget=spec.prefill.max_num_batched_tokens,
        )
        return prefill_policy(self.words.prefill_policy, context)

    def replica(
        self, placements: list[Placement] | None, relocations: Relocations | None
    ) -> ReplicaPolicy | None:
        """Return what calls a replica choice of another package; None where it is compiled."""
        spec = self.prepared.spec
        groups = [each.group for each in (spec.decode, spec.prefill) if each.group is not None]
        if placements is None or not groups or groups[0].replica_choice != ASKED:
            return None
        rng = stream(self.load.seed, "replica choice")
        context = PolicyContext(1, rng, rank_moe=groups[0].moe)
        choice = replica_choice(self.words.replica_choice, context)
        return ReplicaPolicy(choice, placements, relocations)

    def decode(self, workload: Workload, replay: Replay, router: int) -> RouterPolicy:
        """Return a router's decode policy, fitted if it needs a fit."""
        prepared = self.prepared
        pools = [pool for pool in prepared.spec.pools if pool.router == router]
        engine, n_engines = pools[0].engine, len(prepared.spec.routers[router])
        step_time, shared = engine.step_time, engine.group
        alike = all(pool.engine.step_time is step_time for pool in pools)
        group_size = engine.parallelism.data_parallel_size
        if any(pool.engine.parallelism.data_parallel_size != group_size for pool in pools):
            problem = f"{', '.join(pool.name for pool in pools)} have groups of different sizes"
            raise InputError("data_parallel_size", problem, "one size behind a router")
        spread = engine.parallelism.n_expert_ranks > 1

        def future(request: int) -> Floats:
            window, offset, steps = (
                int(column[request])
                for column in (workload.decode_request, workload.replay_offset, workload.output_len)
            )
            return replay.activation(window, offset, steps, step_time.n_experts)

        def placements() -> list[Placement]:
            self.trace()
            seed, fitted = self.load.seed, self.calibration
            placed = [placing.place_pool(prepared, seed, pool.name, None, fitted) for pool in pools]
            return [one.placement for pool in placed for one in pool]

        return decode_policy(
            self.words.policy,
            PolicyContext(
                n_workers=n_engines,
                rng=stream(self.load.seed, "decode policy"),
                calibration=self.calibration,
                artifact=self._artifact,
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

    def signature_costs(self) -> tuple[float, float]:
        """Return what signatures take, s: of each prefill step, and of each request at a router."""
        costs = parameters("decode", self.words.policy)
        if not isinstance(costs, SignatureParameters):  # another package's, without own figures
            costs = SignatureParameters()
        return costs.capture_overhead_ms / 1e3, costs.routing_overhead_ms / 1e3

    def refuse_signatures(self) -> InputError:
        """Return the error of a policy that co-located workers cannot have."""
        return InputError(
            "policy",
            f"{self.words.policy!r} reads expert signatures, which no prefill has made when a "
            "request arrives at co-located workers",
            "a policy that needs none, such as jsq, or a topology such as 8P16D",
        )


def queue_keys(order: QueueOrder, workload: Workload) -> Floats:
    """Return the key by which each request is admitted, float64 ``[requests]``."""
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


def _kv_token_s(prepared: PreparedRun, pool: PoolSpec) -> float:
    """Return the seconds that a token's KV cache takes to a worker of a pool, alone on its link."""
    transfer = pool.transfer or prepared.spec.transfer
    n_bytes = pool.engine.parallelism.shard(prepared.model).kv_bytes_per_token
    return n_bytes / min(transfer.bandwidth, transfer.ingress)


@lru_cache(maxsize=8)
def _calibration(
    trace: RoutingTrace, workload: str, domain_mix: Mix, score: PromptScore, at_least: int = 1
) -> CalibrationSet:
    """Pick calibration requests; those picked before are not read again by this process."""
    mix = None if domain_mix is None else dict(domain_mix)
    return calibration_set(trace, workload=workload, domain_mix=mix, score=score, at_least=at_least)


@lru_cache(maxsize=16)
def _fit(
    trace: RoutingTrace,
    workload: str,
    domain_mix: Mix,
    n_decoders: int,
    seed: int,
    options: FitOptions,
) -> RoutingArtifact:
    """Fit ELDR's router; a sweep's points differ in what no fit depends on, such as the rate."""
    from eldr_sim.policies.eldr.artifact import cached_fit  # only runs of ELDR need it
    from eldr_sim.policies.eldr.signature import score_of

    def calibration() -> CalibrationSet:
        return _calibration(trace, workload, domain_mix, score_of(options.transform), n_decoders)

    mix = None if domain_mix is None else dict(domain_mix)
    return cached_fit(trace, workload, mix, calibration, n_decoders, seed, options)
