"""What a cluster runs: its parts, put together by :mod:`~eldr_sim.simulator.run`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eldr_sim.arrays import Array, Floats, Words
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.base import RouterPolicy
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.control.elastic import ElasticGroup
from eldr_sim.simulator.control.relocation import Relocations
from eldr_sim.simulator.control.replica_policy import ReplicaPolicy
from eldr_sim.simulator.plane.steps.expert_union import PromptRows
from eldr_sim.simulator.plane.steps.group_state import Replicas
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
from eldr_sim.simulator.setup.fault_plan import FaultPlan
from eldr_sim.simulator.setup.replay import Replay
from eldr_sim.traces.requests.prefixes import Ranges
from eldr_sim.traces.workload import Workload

#: Of the trace rows that a prompt replays: a number that stands for them, and their counts.
Signatures: TypeAlias = Callable[[Ranges], tuple[int, Array | None]]


@dataclass(frozen=True)
class RunInputs:
    """What a cluster runs.

    ``shards``: the part of the model on one GPU of each pool's workers; ``replay``: bit sets of the
    windows that requests replay; ``signatures``: prefill counts ``[layers, experts]`` (or summed
    gate scores) of the trace rows of a prompt, and a number for them; ``window``: measured
    arrivals, s; ``time_limit_s``: then the rest is unserved; ``expert_masks``: experts on each GPU
    of each worker (`setup.replay.rank_masks`), None where all have one rank; ``placements``: where
    these lie; ``prompts``: rows of prompts' tokens (`setup.replay.prompt_rows`), None: uniform
    routing; ``queue_keys``: of `policies.queue.orders`, None: FCFS; ``replicas``: experts of
    several instances, not in ``expert_masks``; ``relocations``: what moves experts; ``faults``:
    what goes wrong; ``replica_policy``: chooses among ``replicas`` in Python; ``elastic``: groups
    of engines that come and go; ``on_blocks``: called with a worker, and the numbers of the prefix
    blocks that have come to its cache, or gone."""

    spec: ClusterSpec
    shards: Sequence[ModelDims]
    workload: Workload
    replay: Replay
    signatures: Signatures
    policies: Sequence[RouterPolicy]
    window: tuple[float, float]
    time_limit_s: float
    expert_masks: Words | None = None
    prompts: PromptRows | None = None
    placements: Sequence[Placement] | None = None
    queue_keys: Floats | None = None
    replicas: Replicas | None = None
    relocations: Relocations | None = None
    faults: FaultPlan | None = None
    replica_policy: ReplicaPolicy | None = None
    elastic: Sequence[ElasticGroup] = ()
    on_blocks: Callable[[int, Sequence[int], Sequence[int]], None] | None = None
