"""Engines that share experts and step together: attention by engine, experts on the GPUs of all.

In every MoE layer the tokens of all engines are dispatched to the ranks that hold their experts,
and combined back; the slowest engine and the slowest rank of each layer are waited for. An engine
without requests takes part with a dummy batch (vLLM: ``DPEngineCoreProc``)::

    host + attention, dense layers, lm_head of the slowest engine
    + for each MoE layer: dispatch + choice of instances + MoE of the slowest rank + combine

With attention and experts on separate GPUs (MegaScale-Infer, arXiv 2504.02263, Sec. 4) a step
is cut into micro-batches, which pass the stages of a layer in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Array, Bools, Ints, Words
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import (
    busiest_all,
    busiest_direct,
    busiest_forwarded,
    combine_s,
    dispatch_s,
)
from eldr_sim.kernel_profiles.steps.step_cost import attention_s, launch_wait_s, rank_moe_s
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.replicas.base import ChoiceByCount, place_among_equals
from eldr_sim.simulator.plane.steps.group_state import (
    ALL,
    EXPERT,
    METRO,
    NODE,
    OPTIMAL,
    REPLICA_CHOICES,
)
from eldr_sim.simulator.reference.worker import Batch, EngineGroup, Worker, chunk_columns


@dataclass(eq=False)
class GroupStep:
    """A step of a group: the columns of ``state.GROUP_STEP``; seconds, bytes and pairs are summed
    over the layers."""

    start: float
    end: float
    leader: int
    n_busy: int
    own_s: float
    wait_s: float
    moe_s: float
    dispatch_s: float
    combine_s: float
    choice_s: float
    inside_bytes: float
    between_bytes: float
    busiest_pairs: int
    pairs: int


class Layers(NamedTuple):
    """What the MoE layers of a step, or of a micro-batch, take, by layer."""

    moe: Array  #: s, of the slowest rank
    dispatch: Array  #: s
    combine: Array  #: s
    choice: Array  #: s
    inside: Array  #: bytes of the busiest rank inside its node
    between: Array  #: and between nodes
    pairs: Ints  #: token-expert pairs ``[layers, ranks]``
    activated: Ints  #: experts ``[layers, ranks]``: an instance has its own weights to read


class Own(NamedTuple):
    """What engines compute themselves of a step, or of a micro-batch, but for lm_head."""

    slowest: float  #: of the slowest engine, s; all are padded to the fullest
    total: float  #: of all engines, s


class ExpertGroup(EngineGroup):
    """Engines that share experts. ``placement``: where these lie; `relocated` may change it."""

    def __init__(self, cluster: Any, engines: list[Worker]) -> None:
        super().__init__(cluster, engines)
        self.pool, self.cost = engines[0].pool, engines[0].cost
        shared = self.pool.engine.group
        assert shared is not None
        self.shared = shared
        self.ranks = len(engines) * self.shared.ranks_per_engine + self.shared.ffn_ranks
        self.placement: Placement = cluster.inputs.placements[engines[0].number]
        names = {number: name for name, number in REPLICA_CHOICES.items()}
        context = PolicyContext(1, np.random.default_rng(0), rank_moe=self.shared.moe)
        self.choice = registry.replica_choice(names[self.shared.replica_choice], context)
        self.last: GroupStep | None = None
        self._decided_for, self._balances, self._lacking, self._gathered = -1, False, 0, 0
        takes_over = self.pool.router in cluster.handed_to
        balances = self.pool.engine.rules.balance_steps > 0
        self.gathers_prompts = balances and self.pool.decodes and not takes_over

    def balances(self) -> bool:
        """Whether prompts wait for engines of the group that have none, decided once a step.

        They wait ``balance_steps`` steps at most until all have some and a place for them, and
        ``batching_steps`` more then, unless an engine decodes nothing (TensorRT-LLM:
        ``_balance_adp_requests``)."""
        rules, seats = self.pool.engine.rules, self.pool.engine.max_num_seqs
        if not self.gathers_prompts:
            return False
        if self._decided_for == self.n_steps:
            return self._balances
        self._decided_for, all_have = self.n_steps, True
        decoding = []
        for scheduler in (engine.scheduler for engine in self.engines):
            decoding.append(
                sum(s.request.generated < s.request.output_len for s in scheduler.decoding)
            )
            all_have &= bool(scheduler.prefilling or scheduler.waiting or scheduler.preempted)
        if all_have and max(decoding) < seats:
            self._lacking, self._balances = 0, False
            if min(decoding):
                self._balances = self._gathered < rules.batching_steps
                self._gathered = (self._gathered + 1) * self._balances
        else:
            self._lacking += 1
            self._balances = min(decoding) > 0 and self._lacking < rules.balance_steps
            self._lacking *= self._balances
        return self._balances

    # --- a step ---

    def step(self) -> None:
        """Let the engines step together; those without tokens wait."""
        batches = {engine: engine.scheduler.begin_step() for engine in self.engines}
        busy = {engine: batch for engine, batch in batches.items() if any(batch)}
        n_layers, prompts = self.cost.n_moe_layers, any(chunked for _, chunked in busy.values())
        rows = [engine.lm_head_rows(*batch) for engine, batch in busy.items()]
        head = float(self.cost.head_s[max(rows)])
        if self.shared.ffn_ranks:
            parts = [(self.own(part), self.layers(part)) for part in self.micro_batches(busy)]
            stages = [
                (np.full(n_layers, own.slowest / n_layers), layers.dispatch,
                 layers.choice + layers.moe, layers.combine)
                for own, layers in parts
            ]  # fmt: skip
            own_s = head + sum(own.slowest for own, _ in parts)
            seconds = ping_pong(stages) + head
        else:
            own, layers = self.own(busy), self.layers(busy)
            parts = [(own, self.overlapped(busy, own, layers))]
            own_s = head + parts[0][0].slowest
            seconds = own_s + sum(float(each.sum()) for each in parts[0][1][:4])
        most = most_tokens(busy)
        chunks = -(-most // (self.shared.chunk or most))
        again_s = (chunks - 1) * self.shared.chunk_launch_s
        seconds += self.cost.host_s + launch_wait_s(self.cost, seconds, most, prompts, again_s)
        slowdown = max(engine.slowdown for engine in self.engines)
        end = self.env.now + (seconds + self.engines[0].capture_s) * slowdown
        self.n_steps += 1
        end += self.relocated(busy, end)
        computed = sum(own.total for own, _ in parts) + sum(self.cost.head_s[n] for n in rows)

        def total(of: str) -> float:
            return float(sum(getattr(layers, of).sum() for _, layers in parts))

        self.last = GroupStep(
            self.env.now, end, self.engines[0].number, len(busy), own_s,
            len(busy) * own_s - computed, total("moe"), total("dispatch"), total("combine"),
            total("choice"), total("inside"), total("between"),
            int(sum(layers.pairs.max(axis=1).sum() for _, layers in parts)), int(total("pairs")),
        )  # fmt: skip
        self.cluster.group_steps.append(self.last)
        active = int(total("activated"))
        busiest = int(sum(layers.activated.max(axis=1).sum() for _, layers in parts))
        for engine, batch in busy.items():
            engine.move(*batch, end, active, busiest)
        for engine in self.engines:
            engine.step_end = end

    def relocated(self, busy: dict[Worker, Batch], end: float) -> float:
        """Return the seconds that the group waits for experts which move behind a step."""
        return 0.0

    def micro_batches(self, busy: dict[Worker, Batch]) -> Iterator[dict[Worker, Batch]]:
        """Cut each engine's sequences, whole ones, into the micro-batches of a step."""
        m = self.shared.micro_batches
        for j in range(m):
            part = {}
            for engine, (batch, chunked) in busy.items():
                running = engine.scheduler.running
                mine = running[len(running) * j // m : len(running) * (j + 1) // m]
                own = [s for s in batch if s in mine], [s for s in chunked if s in mine]
                if any(own):
                    part[engine] = own
            if part:
                yield part

    def own(self, busy: dict[Worker, Batch]) -> Own:
        """Return what attention and dense layers take."""
        attention, dense = [], []
        for engine, (batch, chunked) in busy.items():
            decoded = sum(s.tokens for s in batch)
            read = engine.attended(len(batch), decoded, sum(s.context for s in batch))
            attention.append(attention_s(self.cost, *read, *chunk_columns(chunked)))
            tokens = decoded + sum(s.chunk for s in chunked)
            dense.append((tokens, self.cost.dense_s[tokens] + self.cost.collectives_s[tokens]))
        total = sum(attention) + sum(seconds for _, seconds in dense)
        tokens, longest = max(dense)
        if self.is_split(tokens, any(chunked for _, chunked in busy.values())):
            half = -(-tokens // 2)
            longest = 2 * (self.cost.dense_s[half] + self.cost.collectives_s[half])
        return Own(max(attention) + longest, total)

    def is_split(self, tokens: int, prompts: bool) -> bool:
        """Return whether a step with this many tokens on its fullest engine is computed as two
        halves, one of which computes while the other is sent."""
        least = self.shared.split_prompts if prompts else self.shared.split_decode
        return 0 < least <= tokens

    def overlapped(self, busy: dict[Worker, Batch], own: Own, layers: Layers) -> Layers:
        """Return layers with the dispatch and combine that computing does not hide: of half a
        layer nothing is, and computing slows beside them."""
        tokens = most_tokens(busy)
        sent = float(layers.dispatch.sum() + layers.combine.sum())
        if not sent or not self.is_split(tokens, any(chunked for _, chunked in busy.values())):
            return layers
        computing = own.slowest + float(layers.moe.sum() + layers.choice.sum())
        left = max(sent - computing, 0.0) + sent / (2 * self.cost.n_moe_layers)
        left += (self.shared.overlap_slowdown - 1.0) * min(sent, computing)
        return layers._replace(
            dispatch=layers.dispatch * (left / sent), combine=layers.combine * (left / sent)
        )

    # --- MoE layers ---

    def layers(self, busy: dict[Worker, Batch]) -> Layers:
        """Return what the MoE layers take of the tokens that engines compute together."""
        shared, rows, homes = self.shared, [], []
        for number, engine in enumerate(self.engines):
            if engine not in busy:
                continue
            tokens = np.concatenate(engine.experts(*busy[engine]))
            run = -(-len(tokens) // shared.ranks_per_engine)  # tokens of a rank
            first = number * shared.ranks_per_engine
            homes.append(first + np.arange(len(tokens)) // run)
            rows.append(tokens)
        prompts = any(chunked for _, chunked in busy.values())
        home, chosen = np.concatenate(homes), self.chosen(np.concatenate(rows))
        layers = [self.layer(layer, home, chosen[:, layer], prompts)
                 for layer in range(self.cost.n_moe_layers)]  # fmt: skip
        return Layers(*map(np.array, zip(*layers, strict=True)))

    def chosen(self, tokens: Words) -> Bools:
        """Return which experts each token has in each layer, ``[tokens, layers, experts]``."""
        words = tokens.reshape(len(tokens), self.cost.n_moe_layers, -1)
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
        return bits[..., : self.cost.n_experts].astype(np.bool_)

    def layer(self, layer: int, home: Ints, chosen: Bools, prompts: bool) -> tuple[Any, ...]:
        """Return a row of `Layers`. ``home``: the rank of each token."""
        shared, ranks = self.shared, self.ranks
        token, expert = np.nonzero(chosen)
        at = layer % len(self.placement.expert)
        slot = self.instances(at, home, token, expert, prompts)
        rank = self.placement.rank[at][slot]
        pairs = np.bincount(rank, minlength=ranks)
        read = np.unique(slot)
        activated = np.bincount(self.placement.rank[at][read], minlength=ranks)
        gathers = shared.gathers and not prompts
        n_home = np.bincount(home, minlength=ranks)
        to_all = busiest_all(n_home, shared.gpus_per_node)
        back = to_all
        if shared.copy_per != ALL:
            back = self.copies(home[token], token, rank)
        out = to_all if gathers else back
        table = shared.gathered if gathers else shared.all_to_all
        moe = sent = returned = 0.0
        for part in self.parts(n_home, prompts):
            moe += max(
                self.rank_s(*both, part, prompts) for both in zip(pairs, activated, strict=True)
            )
            sent += dispatch_s(table, part * out[0], part * out[1])
            returned += combine_s(table, part * back[0], part * back[1])
        inside, between = (
            table.dispatch_bytes * out[tier] + table.combine_bytes * back[tier] for tier in (0, 1)
        )
        replaced = prompts and METRO <= shared.replica_choice <= OPTIMAL
        choice = 0.0 if replaced else shared.choice_s
        return moe, sent, returned, choice, inside, between, pairs, activated

    def instances(self, at: int, home: Ints, token: Ints, expert: Ints, prompts: bool) -> Ints:
        """Return the slot of the placement that computes each pair of a token and an expert: the
        expert's only one, or what the replica choice says (`policies.replicas`)."""
        held = self.placement.expert[at]
        only = np.full(self.cost.n_experts, -1)
        only[held[held >= 0]] = np.flatnonzero(held >= 0)
        if (self.placement.instances(self.cost.n_experts) == 1).all():
            return only[expert]
        choice: Any = self.choice
        if isinstance(choice, ChoiceByCount):
            counts = np.bincount(expert, minlength=self.cost.n_experts)
            slots = choice.instances(counts, self.placement, at, prompts)
            turn = place_among_equals(expert)
            return np.asarray(slots[expert, turn % (slots >= 0).sum(axis=1)[expert]])
        column = place_among_equals(token)
        padded = np.zeros((len(home), max(column, default=0) + 1), np.int64)
        padded[token, column] = expert
        nodes = np.arange(self.ranks) // self.shared.gpus_per_node
        slots = choice.choose(home, padded, self.placement, at, nodes, prompts)
        return np.asarray(slots[token, column])

    def copies(self, home: Ints, token: Ints, rank: Ints) -> Any:
        """Return the copies of tokens that the busiest rank sends or receives inside its node, and
        between nodes: one an expert, a rank, or a node, where the GPU of the same place forwards
        it."""
        shared, ranks = self.shared, self.ranks

        def distinct(place: Ints, n: int) -> Array:
            _, first = np.unique(token * n + place, return_index=True)
            counts = np.bincount(home[first] * n + place[first], minlength=ranks * n)
            return counts.reshape(ranks, n).astype(float)

        if shared.copy_per == EXPERT:
            counts = np.bincount(home * ranks + rank, minlength=ranks * ranks)
            return busiest_direct(counts.reshape(ranks, ranks).astype(float), shared.gpus_per_node)
        if shared.copy_per == NODE:
            nodes = -(-ranks // shared.gpus_per_node)
            to_nodes = distinct(rank // shared.gpus_per_node, nodes)
            return busiest_forwarded(distinct(rank, ranks), to_nodes, shared.gpus_per_node)
        return busiest_direct(distinct(rank, ranks), shared.gpus_per_node)

    def parts(self, n_home: Ints, prompts: bool) -> list[float]:
        """Return the part of the tokens in each chunk that MoE layers compute at once; all engines
        exchange as many chunks as the fullest, or two halves."""
        size, per_engine = self.shared.chunk, self.shared.ranks_per_engine
        engine_tokens = np.add.reduceat(n_home, range(0, len(n_home), per_engine))
        if self.is_split(int(engine_tokens.max()), prompts):
            return [0.5, 0.5]
        if not size or engine_tokens.max() <= size:
            return [1.0]
        chunks = range(-(-int(engine_tokens.max()) // size))
        return [
            float(np.clip(engine_tokens - c * size, 0, size).sum() / engine_tokens.sum())
            for c in chunks
        ]

    def rank_s(self, pairs: int, experts: int, part: float, prompts: bool) -> float:
        """Return what a layer takes on one rank for a part of the tokens, s: all that chose an
        expert miss the part with chance ``(1 - part) ** (pairs / experts)``."""
        if pairs == 0:
            return 0.0
        if part < 1.0:
            read = experts * (1.0 - (1.0 - part) ** (pairs / experts))
            return float(rank_moe_s(self.shared.moe, part * pairs, read, prompts))
        return float(rank_moe_s(self.shared.moe, float(pairs), float(experts), prompts))


def ping_pong(stages: Sequence[tuple[Array, ...]]) -> float:
    """Return what micro-batches take from the first stage to the last: a stage takes one at a time,
    in turn, which goes on when its own stage before and its layer before have ended. ``stages``: of
    each micro-batch, by layer, seconds of attention, dispatch, experts and combine."""
    free, ready = [0.0] * 4, [0.0] * len(stages)
    for layer in range(len(stages[0][0])):
        for j, seconds in enumerate(stages):
            for stage in range(4):
                ready[j] = free[stage] = max(ready[j], free[stage]) + float(seconds[stage][layer])
    return free[3]


def most_tokens(busy: dict[Worker, Batch]) -> int:
    """Return the tokens of the engine that has most in a step."""
    return max(
        sum(s.tokens for s in batch) + sum(s.chunk for s in chunked)
        for batch, chunked in busy.values()
    )
