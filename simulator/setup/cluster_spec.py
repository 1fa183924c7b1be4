"""What a cluster is made of: its engines' settings and what connects them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.plane.front_end import FrontEndSpec
from eldr_sim.simulator.plane.steps.group_state import GroupCost
from eldr_sim.simulator.setup.memory import NO_WINDOWS, WindowBlocks
from eldr_sim.simulator.setup.speculation import Speculation
from eldr_sim.simulator.setup.streaming import PromptLayout
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
    #: What they draft; None where every step yields one token a sequence.
    speculation: Speculation | None = field(default=None, compare=False)

    @property
    def most_decoded(self) -> int:
        """Most tokens that a step computes for sequences that decode."""
        drafts = 0 if self.speculation is None else self.speculation.k
        return self.max_num_seqs * (1 + drafts)

    @property
    def n_expert_ranks(self) -> int:
        """GPUs whose experts a layer waits for: one where each gathers all."""
        streams = self.layout is not None and self.layout.stream is not None
        return 1 if streams else self.parallelism.n_expert_ranks

    @property
    def group_size(self) -> int:
        """Engines that step together."""
        layout = self.layout
        if layout is not None and layout.stream is not None and not layout.together:
            return 1
        return self.parallelism.data_parallel_size


@dataclass(frozen=True)
class ClusterSpec:
    """Size and engine settings of a cluster; see `simulator.setup.config.RunConfig`.

    Routers choose among ``n_prefill`` and ``n_decode`` engines, called workers here; those of one
    group, ``parallelism.data_parallel_size`` in a row, share experts and step together. Without
    prefill workers the ``n_decode`` workers are co-located: they compute the prompts too. Without
    decode workers a request ends with its prompt.
    """

    n_prefill: int
    n_decode: int
    prefill: EngineSpec
    decode: EngineSpec
    max_model_len: int
    block_size: int
    transfer: TransferModel
    load_report_delay_s: float
    max_concurrency: int | None
    #: Output tokens that clients ask for; None where they set no limit.
    max_tokens: int | None = None
    signal_interval_s: float = 0.0
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    #: Engines of a group compute prompts in every so-manieth step if they can decode meanwhile.
    prefill_schedule_interval: int = 1
    #: Whether the sequence of the highest queue key is preempted, not the one that joined last.
    preempt_by_key: bool = False
    #: Who has waited so long at an engine comes first, whatever the queue keys.
    aging_s: float = math.inf
    #: What signatures cost, s: per prefill step, and per request at the router (ELDR Table 1).
    capture_s: float = 0.0
    routing_s: float = 0.0
    #: What the sliding windows of a request take beside its KV blocks.
    windows: WindowBlocks = NO_WINDOWS
    #: What a hand-over takes beside router, transfer and steps, s.
    handover_s: float = 0.0
    #: What a request's way through the router takes longer for each token of its prompt, s.
    routing_token_s: float = 0.0
    #: What requests go through before a router; None where prompts come as token ids.
    front_end: FrontEndSpec | None = None
