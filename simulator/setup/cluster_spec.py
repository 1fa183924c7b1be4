"""What a cluster is made of: its engines' settings and what connects them."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Array
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll
from eldr_sim.kernel_profiles.kernels.flops import PrefillWork, peak_flops, prefill_work
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.steps import weight_streaming
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.plane.front_end import FrontEndSpec
from eldr_sim.simulator.plane.state import HERE, NO_POOL
from eldr_sim.simulator.plane.steps.group_state import GroupCost
from eldr_sim.simulator.setup.config.conditional import NEVER, Conditional
from eldr_sim.simulator.setup.config.engine_rules import EngineRules
from eldr_sim.simulator.setup.config.groups import EngineConfig, KVTierConfig
from eldr_sim.simulator.setup.config.pools import Engine, WorkerPool
from eldr_sim.simulator.setup.kv_tiers import Tier
from eldr_sim.simulator.setup.memory import NO_WINDOWS, WindowBlocks
from eldr_sim.simulator.setup.speculation import Speculation
from eldr_sim.simulator.setup.streaming import NOTHING_STREAMED, PromptLayout
from eldr_sim.simulator.setup.transfer import TransferModel


@dataclass(frozen=True)
class EngineSpec:
    """Step times and engine settings of each worker of a pool."""

    step_time: StepTimeModel
    max_num_seqs: int
    max_num_batched_tokens: int
    n_blocks: int
    parallelism: Parallelism = SINGLE_GPU
    #: What the engines of a group share; None where each has experts of its own.
    group: GroupCost | None = field(default=None, compare=False, repr=False)
    all_to_all: AllToAll | None = field(default=None, compare=False, repr=False)
    n_redundant: int = 0
    #: Of what choosing instances takes; empty where it is not charged.
    choice_provenance: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)
    #: Where the layers of a prefill worker are; None where each GPU has its own.
    layout: PromptLayout | None = None
    rules: EngineRules = field(default_factory=EngineRules)
    #: What they draft; None where every step yields one token a sequence.
    speculation: Speculation | None = field(default=None, compare=False)
    start_up_s: float = field(default=0.0, compare=False)  #: until a new worker serves
    graphs_s: float = field(default=0.0, compare=False)  #: of it, until graphs are captured
    engine: Engine = "vllm"  #: whose
    memory_share: float = 0.92  #: of a GPU, see `memory.kv_blocks`
    #: As it is configured.
    own: WorkerPool = field(default=WorkerPool(workers=1), compare=False)
    elastic: bool = False  #: whether the engines of its group start and stop one by one

    @property
    def most_decoded(self) -> int:
        """Most tokens that a step computes for sequences that decode."""
        drafts = 0 if self.speculation is None else self.speculation.k
        return self.max_num_seqs * (1 + drafts)

    @property
    def n_expert_ranks(self) -> int:
        """The number of GPUs that a layer waits for: one where each gathers all experts."""
        streams = self.layout is not None and self.layout.stream is not None
        return 1 if streams else self.parallelism.n_expert_ranks

    @property
    def group_size(self) -> int:
        """Engines that step together."""
        layout = self.layout
        if layout is not None and layout.stream is not None and not layout.together:
            return 1
        return self.parallelism.data_parallel_size

    @property
    def worker_size(self) -> int:
        """Engines that start and stop together."""
        return 1 if self.elastic else self.group_size

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of a prompt by itself, in steps that hold as many as they can."""
        n = min(self.max_num_batched_tokens // tokens, self.max_num_seqs)
        if n <= 1:
            return self.step_time.prompt_s(tokens)
        return self.step_time.prefill_s([tokens] * n, [0] * n) / n


class PoolSpec(NamedTuple):
    """Workers that are alike, and what becomes of a request when they have computed its prompt."""

    name: str
    n: int  #: engines
    engine: EngineSpec
    #: What comes after the prompt: the number of a router, ``state.HERE`` or ``state.NO_POOL``.
    then: int = int(HERE)
    router: int = 0  #: that chooses among the pool's workers
    #: Of KV caches that its workers send and fetch; None where `ClusterSpec.transfer` says it.
    transfer: TransferModel | None = None
    #: How many bytes at the sender's rate stand for one that it fetches, see `prepare.transfers`.
    kv_weight: float = 1.0

    @property
    def n_workers(self) -> int:
        """Workers, of ``data_parallel_size`` engines each."""
        return self.n // self.engine.parallelism.data_parallel_size

    @property
    def decodes(self) -> bool:
        """Whether its workers generate, and not only compute prompts."""
        return self.then == HERE


def make_pools(
    n_prefill: int, n_decode: int, prefill: EngineSpec, decode: EngineSpec
) -> tuple[PoolSpec, ...]:
    """Return the pools of an ``xPyD`` cluster; of ``xC`` without prefill, ``xP`` without decode."""
    pools = []
    if n_prefill:
        pools.append(PoolSpec("prefill", n_prefill, prefill, 1 if n_decode else int(NO_POOL)))
    if n_decode:
        pools.append(PoolSpec("decode", n_decode, decode, router=len(pools)))
    return tuple(pools)


@dataclass(frozen=True)
class ClusterSpec:
    """Pools and engine settings of a cluster.

    Routers choose among engines, called workers here; those of a group, ``data_parallel_size`` in a
    row, share experts and step together. Workers are numbered pool by pool, those of a router in a
    row; requests come to the first router."""

    pools: tuple[PoolSpec, ...]
    max_model_len: int
    block_size: int
    transfer: TransferModel  #: of KV caches between workers
    load_report_delay_s: float
    max_concurrency: int | None
    max_active_sessions: int | None = None
    #: Output tokens that clients ask for; None where they set no limit.
    max_tokens: int | None = None
    signal_interval_s: float = 0.0
    kv_signal: str = "exact"  #: what routers know of prefix caches, see `parse_kv_signal`
    enable_prefix_caching: bool = True
    #: Of which the loop reads what is marked so.
    scheduler: EngineConfig = field(default_factory=EngineConfig)
    #: Whether the sequence of the highest queue key is preempted, not the one that joined last.
    preempt_by_key: bool = False
    #: A request that has waited this long at an engine comes first, whatever the queue keys.
    aging_s: float = math.inf
    #: What signatures cost, s: per prefill step, and per request at the router (ELDR Table 1).
    capture_s: float = 0.0
    routing_s: float = 0.0
    #: What the sliding windows of a request take beside its KV blocks.
    windows: WindowBlocks = NO_WINDOWS
    handover_s: float = 0.0  #: what a hand-over takes beside router, transfer and steps, s
    #: What a request's way through the router takes longer for each token of its prompt, s.
    routing_token_s: float = 0.0
    #: What requests go through before a router; None where prompts come as token ids.
    front_end: FrontEndSpec | None = None
    #: Where KV blocks are kept beside the workers' caches; how they are loaded; what decides on
    #: who shares a node's, and on what overlaps.
    tiers: tuple[Tier, ...] = ()
    kv_tiers: KVTierConfig = field(default_factory=KVTierConfig)
    gpus_per_node: int = 8
    n_layers: int = 1
    conditional: Conditional = NEVER  #: when decode workers compute prompts
    #: Whether a decode worker reserves KV blocks for a request before its prompt is computed.
    reserves_early: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the pools."""
        return [pool.name for pool in self.pools]

    @property
    def n_workers(self) -> int:
        """Engines of all pools."""
        return sum(pool.n for pool in self.pools)

    def workers_of(self, name: str) -> range:
        """Return the workers of a pool."""
        at = self.names.index(name)
        first = sum(pool.n for pool in self.pools[:at])
        return range(first, first + self.pools[at].n)

    @property
    def routers(self) -> list[range]:
        """The workers of each router."""
        sizes = Counter[int]()
        for pool in self.pools:
            sizes[pool.router] += pool.n
        ends = list(accumulate(sizes[number] for number in range(len(sizes))))
        return [range(end - sizes[number], end) for number, end in enumerate(ends)]

    @property
    def n_prefill(self) -> int:
        """Engines that compute prompts alone."""
        return sum(pool.n for pool in self.pools if not pool.decodes)

    @property
    def n_decode(self) -> int:
        """Engines that decode."""
        return sum(pool.n for pool in self.pools if pool.decodes)

    def of_decoders(self, figure: Callable[[EngineSpec], float]) -> Array:
        """Return a figure of each worker that decodes, by its number among them."""
        pools = [pool for pool in self.pools if pool.decodes]
        return np.repeat([figure(pool.engine) for pool in pools], [pool.n for pool in pools])

    @property
    def prefill(self) -> EngineSpec:
        """The engines that compute prompts; the first pool's where several do."""
        return self.pools[0].engine

    @property
    def decode(self) -> EngineSpec:
        """The engines that decode, the first pool's where several do; without any, `prefill`."""
        return next((pool.engine for pool in self.pools if pool.decodes), self.prefill)


def work_of(model: ModelDims, engine: EngineSpec) -> PrefillWork:
    """Return what prompts cost an engine, and the work at which it hides its transfers, of the
    largest step over as many prompts as may run (MoE-Prefill App. B.4)."""
    n = min(engine.max_num_seqs, engine.max_num_batched_tokens)
    length = min(engine.max_num_batched_tokens // n, engine.step_time.max_model_len)
    parts = engine.step_time.parts(chunks=[(0, length)] * n)
    computes = parts.attention + parts.dense + parts.collectives + parts.moe
    work, streams = prefill_work(model), engine.layout is not None and engine.layout.stream
    n_layers = model.n_moe_layers or model.n_layers
    gpus = engine.parallelism.engine_gpus
    return weight_streaming.with_saturation(
        work,
        streams.stream if streams else NOTHING_STREAMED,
        n_layers=n_layers,
        peak_flops=gpus * peak_flops(model, engine.step_time.gpu),
        layer_s=computes / n_layers,
        batch_flops=n * work.flops(length),
    )
