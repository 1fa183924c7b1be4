"""Steps of prefill workers whose experts stream, or whose layers lie in stages, event by event: an
extension of the reference model."""

import numpy as np
import simpy

from eldr_sim.kernel_profiles.steps.step_cost import chunk_attention_s
from eldr_sim.simulator.reference.worker import EngineGroup, Prefiller, chunk_columns


def layer_seconds(worker, chunked):
    """Seconds that each MoE layer of a step computes, and those of lm_head; experts activated."""
    cost, layers = worker.cost, worker.cost.n_moe_layers
    tokens = sum(s.chunk for s in chunked)
    others = chunk_attention_s(cost, *chunk_columns(chunked)) + cost.dense_s[tokens]
    others += cost.collectives_s[tokens]
    moe, active, counts = [cost.uniform_moe_s[tokens]] * layers, 0, [cost.n_experts] * layers
    if worker.cluster.own_experts:
        active, counts = worker.activated(np.concatenate(worker.experts([], chunked)))
        moe = [cost.mixed_moe_s[tokens][count] for count in counts]
    kernels = others + sum(moe) + cost.head_s[len(chunked)]
    launch_s = cost.prompt_launch_s if tokens > cost.prompt_graph_tokens else 0.0
    others += max(launch_s - kernels, 0.0)
    seconds = [others / layers + own for own in moe]
    layout = worker.pool.engine.layout
    if layout.on_demand:  # the gate has chosen: the layer waits for its experts
        for layer in range(1, layers):
            share = counts[layer] / cost.n_experts
            seconds[layer] += share * layout.stream.stream.gather_s
    return seconds, cost.head_s[len(chunked)], active


class Gatherers:
    """GPUs that gather the experts of the next layer together: processes that wait for each other.

    They live as long as the run. A window's slots are filled from the host in the order of the
    layers, on into the next step.
    """

    def __init__(self, stream, window, n_ranks, n_layers):
        self.stream, self.n_ranks, self.n_layers = stream, n_ranks, n_layers
        self.env = simpy.Environment()
        self.slots = simpy.Store(self.env)  # those that the host may fill
        self.filled = simpy.Store(self.env)  # shards of the layers to come, in turn
        self.offloads = window > 0
        for _ in range(window):
            self.filled.put("shard")
        self.env.process(self.host())

    def host(self):
        while True:
            yield self.slots.get()
            yield self.env.timeout(self.stream.host_s)
            yield self.filled.put("shard")

    def step(self, start, layers_s):
        """Return when each rank has computed its last layer: ``layers_s`` by rank."""
        if start > self.env.now:
            self.env.run(until=start)
        env, layers = self.env, range(self.n_layers)
        began = [[env.event() for _ in layers] for _ in layers_s]
        gathered = [env.event() for _ in layers]
        gathered[0].succeed()
        ends = {}
        env.process(self.gather(began, gathered))
        ranks = [
            env.process(self.compute(rank, seconds, began[rank], gathered, ends))
            for rank, seconds in enumerate(layers_s)
        ]
        env.run(until=env.all_of(ranks))
        return [ends[rank] for rank in range(len(layers_s))]

    def gather(self, began, gathered):
        for layer in range(1, self.n_layers):
            yield self.env.all_of([of_rank[layer - 1] for of_rank in began])
            if self.offloads:
                yield self.filled.get()
            yield self.env.timeout(self.stream.gather_s)
            gathered[layer].succeed()
            if self.offloads and not self.stream.alone:
                yield self.slots.put("slot")

    def compute(self, rank, seconds, began, gathered, ends):
        for layer, own in enumerate(seconds):
            yield gathered[layer]
            began[layer].succeed()
            beside = self.stream.gather_s if layer + 1 < self.n_layers else 0.0
            yield self.env.timeout(own + self.stream.interference * min(own, beside))
            if layer and self.offloads and self.stream.alone:
                yield self.slots.put("slot")
        ends[rank] = self.env.now


class Stages:
    """Stages that steps pass in turn; a step has left a stage when it has computed there."""

    def __init__(self, plan):
        self.plan, self.free = plan, [0.0] * len(plan.shares)
        self.exits = []  # of the steps so far

    def step(self, start, seconds, head, tokens):
        """Return when the next step may begin, and when this one leaves."""
        at = start
        for stage, share in enumerate(self.plan.shares):
            if stage:
                at += self.plan.send_s + self.plan.send_token_s * tokens
                at = max(at, self.free[stage])
            at += seconds * share
            if stage == len(self.plan.shares) - 1:
                at += head
            self.free[stage] = at
        self.exits.append(at)
        # At most as many steps on the way as stages: one of the last so many must have left.
        on_the_way = self.exits[-len(self.free) :]
        left = on_the_way[0] if len(on_the_way) == len(self.free) else 0.0
        return max(self.free[0], left), at


class LayeredGroup(EngineGroup):
    """Workers that gather together, or one of stages."""

    def __init__(self, cluster, engines):
        super().__init__(cluster, engines)
        pool = engines[0].pool
        layout, n_layers = pool.engine.layout, engines[0].cost.n_moe_layers
        if layout.pipeline is not None:
            self.layers = Stages(layout.pipeline)
            return
        stream = layout.stream.stream
        if layout.on_demand:
            stream = stream._replace(gather_s=0.0)
        self.layers = Gatherers(stream, layout.stream.window, len(engines), n_layers)

    def step(self):
        now, cost = self.env.now, self.engines[0].cost
        start, planned, head, by_rank = now + cost.host_s, [], 0.0, []
        for worker in self.engines:
            _, chunked = worker.scheduler.begin_step()
            seconds, own_head, active = [0.0] * cost.n_moe_layers, 0.0, 0
            if chunked:
                seconds, own_head, active = layer_seconds(worker, chunked)
            by_rank.append(seconds)
            head = max(head, own_head)
            planned.append((worker, chunked, active))
        head += self.engines[0].capture_s
        if isinstance(self.layers, Stages):
            tokens = sum(s.chunk for s in planned[0][1])
            end, exit_s = self.layers.step(start, sum(by_rank[0]), head, tokens)
        else:
            end = exit_s = max(self.layers.step(start, by_rank)) + head
        for worker, chunked, active in planned:
            worker.exit_s = exit_s
            if chunked:
                worker.move([], chunked, end, active, active)
            worker.step_end, worker.decided = end, False


class LayeredPrefiller(Prefiller):
    """Computes prompts with layers that stream or lie in stages."""

    group_class = LayeredGroup
