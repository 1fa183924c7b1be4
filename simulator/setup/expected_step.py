"""What a step of engines that share experts takes on mean work, without a simulation.

An expert that a share p of the tokens chooses gets ``B p`` pairs of a step of B tokens, and is
active with probability ``1 - (1 - p)^B``, for tokens that choose independently; the ranks' sums go
through the formula of the simulator's steps (`group_step`). It errs to the low side, by up to 4%: a
mean of maxima is above the maximum of means. Queueing, unlike batches and routers that put like
requests together are left out. Autoscalers know that of a run beforehand."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.steps.step_cost import decode_attention_s
from eldr_sim.policies.placement.base import EMPTY, Placement
from eldr_sim.policies.scaling.base import Offered, PoolFacts, ScalingContext, remembered
from eldr_sim.simulator.plane.steps import group_state
from eldr_sim.simulator.plane.steps.group_step import SharedLayers, price_layers
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config.pools import WorkerPool
from eldr_sim.simulator.setup.prepare import PreparedRun
from eldr_sim.traces.routing.bitsets import count_rows
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload

FloatArray = Floats

_ROWS, _REACHED_ROWS = 65536, 2048  # tokens that shares are counted over


@lru_cache(maxsize=8)
def _rows(trace: RoutingTrace, prompts: bool, most: int) -> Ints:
    """Return rows of the tokens that requests feed: of prompts, or of decode steps."""
    requests = np.flatnonzero(~trace.is_calibration)
    first, length = trace.decode_window(requests)
    if prompts and trace.has_prompts:
        first, length = trace.first_row[requests], trace.prompt_len[requests].astype(np.int64)
    ends = np.cumsum(length)
    chosen = np.linspace(0, ends[-1] - 1, min(most, int(ends[-1]))).astype(np.int64)
    request = np.searchsorted(ends, chosen, side="right")
    return np.asarray(first[request] + chosen - (ends - length)[request])


@lru_cache(maxsize=8)
def expert_shares(trace: RoutingTrace, prompts: bool = False) -> FloatArray:
    """Return the share of tokens that choose each expert, ``[layers, experts]``."""
    rows = np.ascontiguousarray(trace.bits[_rows(trace, prompts, _ROWS)])
    return count_rows(rows, trace.n_experts) / len(rows)


def activated(share: FloatArray, tokens: float) -> FloatArray:
    """Return the probability that any of ``tokens`` independent tokens chooses an expert."""
    return np.asarray(-np.expm1(tokens * np.log1p(-np.minimum(share, 1.0 - 1e-12))))


class ExpectedStep:
    """The mean work of a group's ranks, for any number of tokens. ``engine``: of a pool of engines
    that share experts; ``trace``: of the tokens served; ``prompts``: whether those of prompts."""

    def __init__(
        self, engine: EngineSpec, placement: Placement, trace: RoutingTrace, prompts: bool
    ) -> None:
        assert engine.group is not None
        self.engine, self.group, self.computes = engine, engine.group, prompts
        #: GPUs that are home to tokens, the first ones: all, or those of attention alone.
        self.homes = engine.parallelism.first_expert_rank or placement.n_ranks
        first = engine.parallelism.first_expert_rank
        self.ranks, layers = first + placement.n_ranks, engine.step_time.n_moe_layers
        self._tile = np.arange(layers) % len(placement.expert)
        self.shares, n = expert_shares(trace, prompts), trace.n_experts
        self.copies = placement.instances(n)
        #: ``[layers, experts, ranks]``: the part of an expert's instances that a rank holds.
        self.held = np.zeros((*self.shares.shape, self.ranks))
        layer, slot = np.nonzero(placement.expert != EMPTY)
        rank = first + placement.rank[layer, slot]
        np.add.at(self.held, (layer, placement.expert[layer, slot], rank), 1)
        self.held /= self.copies[:, :, None]
        #: ``[layers, ranks]``: token-expert pairs of a rank, a token of the step.
        self.pairs = self._by_rank(self.shares)
        self.node = min(self.group.gpus_per_node, self.ranks)
        self._work = group_state.make_group_scratch(layers, 1, self.ranks, 1, 1)
        self._traffic = (
            None if self.group.copy_per == group_state.ALL else self._sent(trace, placement)
        )

    def _sent(self, trace: RoutingTrace, placement: Placement) -> FloatArray:
        """Return copies that ranks send and receive, a token of each rank: `all_to_all_cost`."""
        ranks, node, kind = self.ranks, self.node, self.group.copy_per
        home, place = np.divmod(np.arange(ranks), node)
        same = home[:, None] == home[None, :]
        direct = self.pairs if kind == group_state.EXPERT else self._reached(trace, placement, 1)
        own = (np.arange(ranks) < self.homes).astype(float)  # tokens of a rank
        near = own[:, None] * (same & ~np.eye(ranks, dtype=bool))
        far = own[:, None] * ~same
        copies = [direct @ near.T, direct * near.sum(axis=0)]
        if kind != group_state.NODE:
            copies += [direct @ far.T, direct * far.sum(axis=0)]
        else:  # ranks of the same place send between nodes, and pass on inside
            column = np.bincount(place, own)[place]
            nodes = self._reached(trace, placement, node)  # [layers, nodes]
            there, every = nodes[:, home], nodes.sum(axis=1, keepdims=True)
            passed = column[:, None] * (same & ~np.eye(ranks, dtype=bool))
            copies = [direct @ passed.T, direct * passed.sum(axis=0)]
            copies += [own * (every - there), (column - own) * there]
        return np.stack([each.T[:, self._tile] for each in copies])

    def _reached(self, trace: RoutingTrace, placement: Placement, size: int) -> FloatArray:
        """Return the share of tokens with any expert on each run of ``size`` ranks."""
        first = np.argmax(self.held > 0, axis=2) // size  # [layers, experts]
        rows = np.ascontiguousarray(trace.bits[_rows(trace, self.computes, _REACHED_ROWS)])
        reached = np.zeros((len(self.shares), -(-self.ranks // size)))
        for layer, target in enumerate(first):
            words = rows[:, layer].view(np.uint8)
            bits = np.unpackbits(words, axis=-1, bitorder="little")[:, : len(target)]
            onto = np.zeros((len(target), reached.shape[1]), np.float32)
            onto[np.arange(len(target)), target] = 1.0
            reached[layer] = (bits.astype(np.float32) @ onto > 0).mean(axis=0)
        return reached

    def _by_rank(self, values: FloatArray) -> FloatArray:
        """Sum what experts have, ``[layers, experts]``, over the ranks that hold their parts."""
        return np.asarray(np.einsum("le,ler->lr", values, self.held))

    def _active(self, tokens: int) -> FloatArray:
        """Return the activated instances of each rank, ``[layers, ranks]``."""
        choice, most = self.group.replica_choice, int(self.copies.max())
        if most == 1 or (
            choice >= group_state.METRO and not self.computes
        ):  # one instance, whichever
            return self._by_rank(activated(self.shares, tokens))
        if choice < group_state.EVEN:  # each token chooses by itself
            each = activated(self.shares / self.copies, tokens) * self.copies
            return self._by_rank(each)
        # In turn: n tokens activate min(n, copies) instances.
        share = np.minimum(self.shares, 1.0 - 1e-12)
        exactly = np.exp(tokens * np.log1p(-share))
        above, total = 1.0 - exactly, np.zeros_like(share)
        for j in range(most):
            total += np.where(self.copies > j, above, 0.0)
            exactly = exactly * (tokens - j) / (j + 1) * share / (1.0 - share)
            above = np.maximum(above - exactly, 0.0)
        return self._by_rank(total)

    def layers(self, tokens: int) -> SharedLayers:
        """Return what the MoE layers of a step of ``tokens`` tokens of the group take."""
        work, at_home = self._work, tokens / self.homes
        work.pairs[:] = (tokens * self.pairs).T[:, self._tile]
        work.instances[:] = self._active(tokens).T[:, self._tile]
        if self._traffic is not None:
            work.traffic[:] = at_home * self._traffic
        work.tokens[: self.homes] = np.diff(np.rint(at_home * np.arange(self.homes + 1)))
        found: SharedLayers = price_layers(self.group, work, self.ranks, self.computes)
        return found

    def _moe_s(self, tokens: int) -> float:
        shared = self.layers(tokens)
        choice_s = self.group.choice_s * len(self._tile)
        return float(shared.moe_s + shared.dispatch_s + shared.combine_s) + choice_s

    def decode_s(self, batch: int, context: float, each: int = 1) -> float:
        """Return the seconds of a step of ``batch`` sequences of every engine, ``each`` tokens."""
        cost, tokens = self.engine.step_time.cost, batch * each
        if self.group.ffn_ranks:
            return self._ping_pong_s(batch, context)
        own = cost.dense_s[tokens] + cost.head_s[tokens] + cost.collectives_s[tokens]
        own += cost.host_s + decode_attention_s(cost, batch, batch * context)
        return float(own) + self._moe_s(tokens * self.engine.parallelism.data_parallel_size)

    def _ping_pong_s(self, batch: int, context: float) -> float:
        """Return the seconds of a step in micro-batches, all layers alike: see `disaggregated`."""
        cost, m = self.engine.step_time.cost, min(self.group.micro_batches, batch)
        part, n = -(-batch // m), len(self._tile)
        own = cost.dense_s[part] + cost.collectives_s[part]
        own += decode_attention_s(cost, part, part * context)
        tokens = round(batch / m * self.engine.parallelism.data_parallel_size)
        shared = self.layers(max(tokens, 1))
        experts = shared.moe_s + self.group.choice_s * n
        stages = np.array([own, shared.dispatch_s, experts, shared.combine_s], float) / n
        trip, longest = float(stages.sum()), float(stages.max())
        seconds = n * trip + (m - 1) * longest
        if m * longest >= trip:
            seconds = trip + (m * n - 1) * longest
        return seconds + float(cost.host_s + cost.head_s[batch])

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step in which every engine computes such ``chunks``."""
        parts = self.engine.step_time.parts(chunks=chunks)
        tokens = sum(new for _, new in chunks) * self.engine.parallelism.data_parallel_size
        return float(sum(parts) - parts.moe) + self._moe_s(tokens)

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of an engine for each of as many prompts as its steps hold."""
        budget = self.engine.max_num_batched_tokens
        n = max(1, min(budget // tokens, self.engine.max_num_seqs))
        steps = [[(at, min(budget, tokens - at))] * n for at in range(0, tokens, budget)]
        return math.fsum(map(self.prefill_s, steps)) / n


def scaling_facts(
    made_pools: Sequence[WorkerPool],
    switch_time: float | Literal["graphs"],
    prepared: PreparedRun,
    workload: Workload,
    works: Sequence[Mapping[int, Callable[[], ExpectedStep]]],
    pauses: Mapping[str, Callable[[int, int], float]],
) -> ScalingContext:
    """Return what is known of the pools of a run and of its requests. ``works``: expected steps of
    engines that share experts, by their number; ``pauses``: `PoolFacts.pause_s`."""
    spec, fetching = prepared.spec, {name for p in made_pools for name in p.takes_over}
    pools = []
    for pool, made, own in zip(spec.pools, made_pools, works, strict=True):
        facts = PoolFacts(
            name=pool.name,
            computes=pool.name not in fetching,
            decodes=pool.decodes,
            engines=pool.engine.worker_size,
            gpus=made.units[1],
            max_num_seqs=pool.engine.max_num_seqs,
            kv_tokens=pool.engine.n_blocks * spec.block_size,
            start_up_s=pool.engine.start_up_s,
            switch_s=pool.engine.graphs_s if switch_time == "graphs" else switch_time,
            prompt_s=pool.engine.prompt_s,
            step_s=partial(_decode_s, prepared.model, pool.engine),
            token_budget=pool.engine.max_num_batched_tokens,
        )
        by_width = {
            n: remembered(
                facts._replace(prompt_s=_asked(work, "prompt_s"), step_s=_asked(work, "decode_s"))
            )
            for n, work in own.items()
        }
        facts = by_width[max(by_width)] if by_width else remembered(facts)
        if pool.name in pauses:
            pause_s = lru_cache(4096)(pauses[pool.name])
            facts = facts._replace(widths=by_width, pause_s=pause_s)
        pools.append(facts)
    arrival_s = workload.arrival_s
    prompts, outputs = (
        np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        for tokens in (workload.prompt_len, workload.output_len)
    )

    def known(begin: float, end: float) -> Offered:
        first, last = np.searchsorted(arrival_s, (begin, end))
        n = max(1, int(last - first))
        sums = prompts[last] - prompts[first], outputs[last] - outputs[first]
        return Offered(float(last - first), float(sums[0]) / n, float(sums[1]) / n)

    return ScalingContext(tuple(pools), known)


def _asked(work: Callable[[], ExpectedStep], what: str) -> Callable[..., float]:
    """Return a question to mean work that is worked out with the first one."""
    return lambda *asked: float(getattr(work(), what)(*asked))


def _decode_s(model: ModelDims, engine: EngineSpec, sequences: int, context: float) -> float:
    """Return the seconds of a decode step, with the experts that uniform routing activates."""
    share = model.top_k / model.n_experts if model.n_experts else 0.0
    union = model.n_experts * (1.0 - (1.0 - share) ** sequences)
    activated = [union / engine.n_expert_ranks] * engine.step_time.n_moe_layers
    return engine.step_time.decode_s(activated, sequences, context)
