"""What a cluster runs: its parts, put together by :mod:`~eldr_sim.simulator.run`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.base import RouterPolicy
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
Signatures: TypeAlias = Callable[[Ranges], tuple[int, NDArray[Any] | None]]


@dataclass(frozen=True)
class Inputs:
    """What a cluster runs.

    Attributes
    ----------
    spec, shards
        The cluster, and the part of its model on one GPU of each pool's workers.
    workload, replay
        The requests, and the bit sets of the windows they replay.
    signatures
        Gives the prefill counts ``[layers, experts]`` of the trace rows that a prompt replays
        (summed gate scores where the decode policy asks for them), and a number that stands for
        them: the routers' view of a prompt.
    policies
        Those of the routers.
    window
        Requests that arrive in this window, s, are measured.
    time_limit_s
        Simulated time after which the run gives the rest up as unserved.
    expert_masks
        The experts on each expert-parallel GPU of each worker, prefill workers first, see
        `simulator.setup.replay.rank_masks`; None where every worker has one such rank.
    prompts
        The rows of the prompts' tokens, see `simulator.setup.replay.prompt_rows`: what
        the steps that compute them activate. None expects uniform routing there.
    queue_keys
        What the queue order makes of each request, see `policies.queue.orders`; None is first come,
        first served.
    replicas
        Experts with several instances, which ``expert_masks`` leave out; None where there are none.
    relocations
        What moves the experts of groups while they run; None leaves them where they are.
    faults
        What goes wrong; None: nothing.
    replica_policy
        Chooses among ``replicas`` in Python; None where compiled code does.
    elastic
        The groups whose engines come and go.
    """

    spec: ClusterSpec
    shards: Sequence[ModelDims]
    workload: Workload
    replay: Replay
    signatures: Signatures
    policies: Sequence[RouterPolicy]
    window: tuple[float, float]
    time_limit_s: float
    expert_masks: NDArray[np.uint64] | None = None
    prompts: PromptRows | None = None
    queue_keys: NDArray[np.float64] | None = None
    replicas: Replicas | None = None
    relocations: Relocations | None = None
    faults: FaultPlan | None = None
    replica_policy: ReplicaPolicy | None = None
    elastic: Sequence[ElasticGroup] = ()
