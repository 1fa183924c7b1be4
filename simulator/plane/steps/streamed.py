"""Steps of prefill workers without all layers on their GPU: streamed weights, stages.

**Streamed** (MoE-Prefill's AsyncEP): a GPU computes its own prompts with all experts, and gathers
those of the next layer from other GPUs, or the host, while a layer computes
(`kernel_profiles.steps.weight_streaming.streamed_ends`). Engines that gather by collectives step
together, one-sided ones each at their own pace. Experts gathered as needed are known when the gate
of their layer has chosen: that hides behind nothing.

**Stages** (pipeline parallelism): the next step follows when the first stage is free, as many on
the way as stages (vLLM's batch queue, ``vllm/v1/engine/core.py``, ``step_with_batch_queue``). A
stage begins when the one before has sent its hidden states and its own last step has ended. A
record of ``STEP`` ends when the next step may begin; prompts end with the last stage."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.jit import Entry
from eldr_sim.kernel_profiles.steps.step_cost import StepParts, launch_wait_s, step_parts
from eldr_sim.kernel_profiles.steps.weight_streaming import Stream, streamed_ends
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.steps import expert_union
from eldr_sim.simulator.plane.steps.executor import Scratch, list_chunks
from eldr_sim.simulator.plane.steps.plain import add_chunks


class PromptLayers(NamedTuple):
    """Where the layers of prefill workers are, as the compiled loop knows it."""

    stream: Stream
    expert_s: float  #: of each expert that a layer's gate chooses; 0 where layers come whole, s
    loaded: Floats  #: ``[workers, W]``, see `streamed_ends`
    layers_s: Floats  #: ``[workers, MoE layers]``: what each layer computes, s
    start: Floats  #: ``[workers]``: of its first layer, s
    end: Floats  #: ``[workers]``: of its last layer, s
    stage_share: Floats  #: ``[stages]``: of the layers; of none where weights stream
    send_s: float  #: from stage to stage, whatever the tokens
    send_token_s: float  #: and for each token
    stage_end: Floats  #: ``[workers, stages]``: of the last step there, s
    exits: Floats  #: ``[workers, stages]``: of the last steps, in turn, s


def no_prompt_layers() -> PromptLayers:
    """Return what stands for prefill workers with all layers on their GPU."""
    one, two = np.zeros(0), np.zeros((0, 0))
    return PromptLayers(
        Stream(0.0, 0.0, 0.0, True), 0.0, two, two, one, one, one, 0.0, 0.0,
        two, two,
    )  # fmt: skip


@Entry
def execute(world: Any, leader: int) -> float:
    """Return when the next step of ``leader``, or those that gather with it, may begin, s."""
    run, engines, layers, scratch = world.run, world.run.engines, world.layers, world.run.scratch
    cost = run.costs[engines.pool_of[leader]]
    workers, pool = engines.workers, engines.pools[engines.pool_of[leader]]
    size, n_layers = pool.group_size, layers.layers_s.shape[1]
    start, head, computes = run.clock[0].now, 0.0, 0.0
    for w in range(leader, leader + size):
        layers.start[w] = start + cost.host_s
        if workers[w].chunk_tokens == 0:  # a dummy batch: it gathers with the others
            for layer in range(n_layers):
                layers.layers_s[w, layer] = 0.0
            continue
        parts = _layer_times(engines, w, run.bits, run.masks, run.prompts, cost, layers, scratch)
        head = max(head, parts.head)
        kernels_s = parts.attention + parts.dense + parts.collectives + parts.moe
        launches_s = launch_wait_s(cost, kernels_s + parts.head, workers[w].chunk_tokens, True)
        computes = max(computes, kernels_s + launches_s)
    head += pool.capture_s
    if layers.stage_share.shape[0] > 0:
        end = _pass_stages(workers, leader, start + cost.host_s, computes, head, layers)
    else:
        streamed_ends(
            layers.start, layers.layers_s, leader, size, n_layers, layers.stream, layers.loaded,
            layers.end,
        )  # fmt: skip
        end = start
        for w in range(leader, leader + size):
            end = max(end, layers.end[w])
        pool.stall_s += end - (start + cost.host_s + computes)
        end += head
        pool.streamed_s += end - start
        for w in range(leader, leader + size):
            workers[w].exit_s = end
    return float(end)


@compiled()
def _layer_times(
    engines: Engines, w: int, bits: Any, masks: Any, prompts: Any, cost: Any,
    layers: PromptLayers, scratch: Scratch,
) -> StepParts:  # fmt: skip
    """Write what each layer of a worker's step computes; return the parts of the whole step."""
    own_experts = engines.pools[engines.pool_of[w]].own_experts
    n_chunks, rows = list_chunks(engines, w, scratch)
    scratch.active[w] = 0
    if own_experts:
        expert_union.union_rows(bits, scratch.rows, np.int64(0), np.int64(0), scratch.union)
        add_chunks(engines, w, bits, prompts, scratch.union)
        active, _ = expert_union.count_experts(scratch.union, masks[w], scratch.activated)
        scratch.active[w] = active
    scratch.busiest[w] = scratch.active[w]
    parts = step_parts(
        cost, np.int64(0), np.int64(0), np.int64(0), scratch.cached[:n_chunks],
        scratch.new[:n_chunks], rows, scratch.activated, not own_experts,
    )  # fmt: skip
    n_layers, tokens = layers.layers_s.shape[1], engines.workers[w].chunk_tokens
    others = parts.attention + parts.dense + parts.collectives
    others += launch_wait_s(cost, others + parts.moe + parts.head, tokens, True)
    others /= n_layers
    for layer in range(n_layers):
        moe, experts = parts.moe / n_layers, np.int64(cost.n_experts)
        if own_experts:
            experts = scratch.activated[layer]
            moe = cost.mixed_moe_s[tokens, experts]
        layers.layers_s[w, layer] = others + moe
        if layer > 0:
            layers.layers_s[w, layer] += experts * layers.expert_s
    return parts  # type: ignore[no-any-return]


@compiled()
def _pass_stages(
    workers: Any, w: int, start: float, computes: float, head: float, layers: PromptLayers
) -> Any:
    """Send a step through the stages; return when the next one may begin, s."""
    n_stages = layers.stage_share.shape[0]
    send = layers.send_s + layers.send_token_s * workers[w].chunk_tokens
    at = start
    for stage in range(n_stages):
        if stage > 0:
            at = max(at + send, layers.stage_end[w, stage])
        at += computes * layers.stage_share[stage]
        if stage == n_stages - 1:
            at += head
        layers.stage_end[w, stage] = at
    workers[w].exit_s = at
    # The oldest step on the way leaves before one more begins than there are stages.
    for i in range(n_stages - 1):
        layers.exits[w, i] = layers.exits[w, i + 1]
    layers.exits[w, n_stages - 1] = at
    return max(layers.stage_end[w, 0], layers.exits[w, 0])
