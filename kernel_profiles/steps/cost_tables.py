"""The tables that a step is priced with, as compiled code takes them."""

from typing import NamedTuple

from eldr_sim.arrays import Floats


class StepCost(NamedTuple):
    """The tables of a step's time, as compiled code takes them; all times are seconds. See
    :mod:`~eldr_sim.kernel_profiles.steps.step_cost` for the formula."""

    n_moe_layers: int
    n_experts: int  #: of a layer, on all ranks
    moe_s: Floats  #: ``[sequences + 1, experts + 1]`` one MoE layer of a decode step
    mixed_moe_s: Floats  #: ``[tokens + 1, experts + 1]`` where contexts are computed, too
    uniform_moe_s: Floats  #: ``[tokens + 1]`` likewise, under uniform routing
    dense_s: Floats  #: ``[tokens + 1]`` all layers but experts and attention, embedding
    collectives_s: Floats  #: ``[tokens + 1]``
    host_s: float
    head_s: Floats  #: ``[sequences + 1]`` lm_head
    attention_s: Floats  #: ``[sequences + 1, knots]`` of all layers, decode, by mean context
    context_stride: int  #: tokens between two knots
    prompt_alone_s: Floats  #: ``[context + 1]`` of all layers, a prompt by its length
    prompt_share_s: Floats  #: ``[context + 1]`` likewise, beside others
    prompt_floor_s: float
    prompt_token_s: float  #: of reading one cached token
    #: In which the host launches the kernels of a step without prompts and with; 0 with graphs of
    #: any size.
    launch_s: float = 0.0
    prompt_launch_s: float = 0.0
    #: Steps without prompts and with of at most this many tokens are graphs.
    graph_tokens: int = 0
    prompt_graph_tokens: int = 0


class RankMoE(NamedTuple):
    """One MoE layer of one rank, as compiled code takes it (`step_cost.rank_moe_s`): every (knot,
    count) up to the slots has a time."""

    top_k: int
    rows: Floats  #: ``[knots]`` token-expert pairs / top_k, ascending from 0
    decode_s: Floats  #: ``[knots, slots + 1]`` by activated experts, of steps without prompts
    mixed_s: Floats  #: ``[knots, slots + 1]`` of steps that hold prompts
