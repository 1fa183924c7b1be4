"""A step of engines that share experts, token by token."""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import EMPTY
from eldr_sim.simulator.plane.steps.group_state import REPLICA_CHOICES

from .step_seconds import at_least_launched, chunk_attention_seconds, decode_attention_seconds


def line(x, knots, values):
    """Linear between knots, and beyond the last one."""
    i = min(max(int(np.searchsorted(knots, x, side="right")) - 1, 0), len(knots) - 2)
    slope = (values[i + 1] - values[i]) / (knots[i + 1] - knots[i])
    return values[i] + slope * (x - knots[i])


def rank_seconds(moe, pairs, activated, prompts):
    """One MoE layer of one rank."""
    table = moe.mixed_s if prompts else moe.decode_s
    return line(pairs / moe.top_k, moe.rows, table[:, activated])


def own_seconds(cost, batch, context, chunks, tokens, rows):
    """Attention, and the dense parts, of one engine."""
    attention = decode_attention_seconds(cost, batch, context) if batch else 0.0
    if chunks:
        attention += chunk_attention_seconds(cost, chunks)
    return attention, cost.dense_s[tokens], cost.head_s[rows], cost.collectives_s[tokens]


def chunk_parts(engine_of_token, size):
    """The part of the tokens in each chunk; all engines have as many as the fullest."""
    tokens = Counter(engine_of_token)
    chunks = range(-(-max(tokens.values(), default=1) // size)) if size else range(1)
    held = [sum(min(max(n - c * size, 0), size or n) for n in tokens.values()) for c in chunks]
    return [n / len(engine_of_token) for n in held] if engine_of_token else [1.0]


class Traffic:
    """What the tokens of one layer send from rank to rank."""

    def __init__(self, n_ranks, gpus_per_node, copy_per):
        self.n_ranks, self.gpus_per_node, self.copy_per = n_ranks, gpus_per_node, copy_per
        self.sends = []  # (from rank, to rank)
        self.homes = []

    def node(self, rank):
        return rank // self.gpus_per_node

    def token(self, home, ranks):
        """Send a token whose experts lie on ``ranks``, one entry an expert."""
        self.homes.append(home)
        if self.copy_per == "expert":
            self.sends += [(home, rank) for rank in ranks if rank != home]
        elif self.copy_per == "rank":
            self.sends += [(home, rank) for rank in sorted(set(ranks)) if rank != home]
        elif self.copy_per == "node":
            for node in {self.node(rank) for rank in ranks}:
                door = home
                if node != self.node(home):
                    door = home % self.gpus_per_node + node * self.gpus_per_node
                    self.sends.append((home, door))
                here = {rank for rank in ranks if self.node(rank) == node}
                self.sends += [(door, rank) for rank in sorted(here) if rank != door]

    def busiest(self):
        """The most copies a rank sends or receives, inside its node and between nodes."""
        if self.copy_per == "all":
            return self.busiest_all()
        inside, between = np.zeros((2, self.n_ranks)), np.zeros((2, self.n_ranks))
        for home, rank in self.sends:
            tier = inside if self.node(home) == self.node(rank) else between
            tier[0, home] += 1
            tier[1, rank] += 1
        return inside.max(), between.max()

    def busiest_all(self):
        """Gathered: inside it gets all others' tokens, between nodes shared by the node's GPUs."""
        here = np.bincount(self.homes, minlength=self.n_ranks)
        between = 0.0
        for node in {self.node(rank) for rank in range(self.n_ranks)}:
            members = [rank for rank in range(self.n_ranks) if self.node(rank) == node]
            between = max(between, (here.sum() - here[members].sum()) / len(members))
        return (here.sum() - here).max(), between


class Instances:
    """Which instance of an expert computes a token: the rules of `replicas.base`, in words."""

    def __init__(self, placement, n_trace_layers, choice, gpus_per_node, moe, prompts):
        self.choice, self.gpus_per_node, self.prompts = choice, gpus_per_node, prompts
        self.turns = Counter()
        self.placement, self.slots = placement, {}
        self.by_token = choice in ("hash", "source", "weighted", "local_first")
        if not self.by_token:
            context = PolicyContext(1, np.random.default_rng(0), rank_moe=moe)
            self.policy = registry.replica_choice(choice, context)
        self.homes = [
            {
                expert: np.flatnonzero(placement.expert[layer] == expert).tolist()
                for expert in set(placement.expert[layer].tolist()) - {EMPTY}
            }
            for layer in range(n_trace_layers)
        ]

    def decide(self, tokens):
        """Let choices by count see how many tokens each (layer, expert) has."""
        if self.by_token:
            return
        n_experts = int(self.placement.expert.max()) + 1
        for layer in {layer for layer, _ in tokens}:
            counts = np.array([tokens[layer, expert] for expert in range(n_experts)])
            at = layer % len(self.homes)
            slots = self.policy.instances(counts, self.placement, at, self.prompts)
            for expert, own in enumerate(slots):
                self.slots[layer, expert] = own[own >= 0].tolist()

    def rank_of(self, layer, slot):
        return int(self.placement.rank[layer % len(self.homes)][slot])

    def slot(self, layer, expert, home, place):
        """The slot that computes a token."""
        slots = self.homes[layer % len(self.homes)][expert]
        if len(slots) == 1:
            return slots[0]
        hashed = place * 2_654_435_769 % 2**32
        if (layer, expert) in self.slots:
            slots = self.slots[layer, expert]
            self.turns[layer, expert] += 1
            return slots[(self.turns[layer, expert] - 1) % len(slots)]
        if self.choice in ("source", "local_first"):
            node = home // self.gpus_per_node
            ranks = {slot: self.rank_of(layer, slot) for slot in slots}
            on_node = [s for s in slots if ranks[s] // self.gpus_per_node == node]
            slots = [s for s in slots if ranks[s] == home] or on_node or slots
        if self.choice in ("weighted", "local_first"):
            return self.drawn(layer % len(self.homes), expert, home, place, slots)
        return slots[hashed % len(slots)]

    def drawn(self, at, expert, home, place, slots):
        """Draw by the inverse of the ranks' loads, with SplitMix64 of a counter."""
        weights = [1.0] * len(slots)
        if self.placement.load is not None:
            load = self.placement.load[at]
            own = [load[self.rank_of(at, slot)] for slot in slots]
            weights = [1 / max(one, 1e-6 * load.mean() or 1.0) for one in own]
        z = (place << 40) + (home << 28) + (at << 16) + expert + 0x9E3779B97F4A7C15
        z = (z ^ z % 2**64 >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        wanted = ((z ^ z >> 31) >> 32) / 2**32 * sum(weights)
        return next(s for s, so_far in zip(slots, accumulate(weights), strict=True)
                    if so_far > wanted)  # fmt: skip


class Part(NamedTuple):
    """What tokens that are computed together take; lists go by layers."""

    own: list  #: parts of each engine that has any
    prompts: bool
    moe: list
    dispatch: list
    combine: list
    choosing: float  #: in each layer
    pairs: np.ndarray  #: by layer and rank
    counts: list  #: activated experts, likewise
    moved: tuple  #: the busiest rank's bytes, inside its node and between
    chosen: list  #: (layer, expert) pairs

    @property
    def slowest(self):
        """The longest of each part of the engines."""
        return [max(part) for part in zip(*self.own, strict=True)]


def part_of(twin, group, busy):
    """Count ``busy`` tokens: of (engine's place, engine, who decodes, who computes a context)."""
    pool, cost = group[0].pool, group[0].cost
    shared = pool.spec.group
    per_engine = shared.ranks_per_engine
    n_ranks = len(group) * per_engine + shared.ffn_ranks
    copy_per = ("all", "expert", "rank", "node")[shared.copy_per]
    layers = range(cost.n_moe_layers)
    leader = group[0].number
    placement = twin.placements[leader]
    if twin.relocations:
        placement = twin.relocations.placement(leader, twin.now) or placement
    pairs = np.zeros((len(layers), n_ranks), int)
    activated = [[set() for _ in range(n_ranks)] for _ in layers]
    own, routed = [], []
    for number, worker, batch, chunked in busy:
        chunks = [(s.cached, s.chunk) for s in chunked]
        decoded = sum(s.tokens for s in batch)
        tokens = decoded + sum(n for _, n in chunks)
        rows = decoded + sum(s not in batch for s in chunked)
        own.append(own_seconds(cost, *worker.read(batch), chunks, tokens, rows))
        run = -(-tokens // per_engine)
        for position, experts in enumerate(worker.token_experts(batch, chunked)):
            home, place = number * per_engine + position // run, position % run
            routed.append((home, place, experts))
    prompts = any(chunked for *_, chunked in busy)
    gathers = shared.gathers and not prompts
    ways = ("all" if gathers else copy_per, copy_per)
    traffic = [[Traffic(n_ranks, shared.gpus_per_node, way) for _ in layers] for way in ways]
    choice = {number: name for name, number in REPLICA_CHOICES.items()}[shared.replica_choice]
    several = any((placement.instances(cost.n_experts) > 1).ravel())
    instances = Instances(
        placement, len(placement.expert), choice, shared.gpus_per_node, shared.moe, prompts
    )
    if several:
        instances.decide(Counter(pair for _, _, experts in routed for pair in experts))
    for home, place, experts in routed:
        for layer in layers:
            chosen = sorted(expert for at, expert in experts if at == layer)
            slots = [instances.slot(layer, expert, home, place) for expert in chosen]
            targets = [instances.rank_of(layer, slot) for slot in slots]
            for slot, rank in zip(slots, targets, strict=True):
                pairs[layer, rank] += 1
                activated[layer][rank].add(slot)  # an instance has weights of its own to read
            for way in traffic:
                way[layer].token(home, targets)
    counts = [[len(found) for found in activated[layer]] for layer in layers]
    parts = chunk_parts([home // per_engine for home, _, _ in routed], shared.chunk)

    def rank_chunk(layer, r, part):
        """A rank's time for a part of the tokens; experts that none of them chose are not read."""
        own, experts = pairs[layer, r], counts[layer][r]
        if not own:
            return 0.0
        seen = experts * (1 - (1 - part) ** (own / experts))
        low = min(int(seen), shared.moe.decode_s.shape[1] - 2)
        below, above = (rank_seconds(shared.moe, part * own, n, prompts) for n in (low, low + 1))
        return below + (seen - low) * (above - below)

    moe = [
        sum(max(rank_chunk(layer, r, part) for r in range(n_ranks)) for part in parts)
        for layer in layers
    ]
    table = shared.gathered if gathers else shared.all_to_all
    out, back = ([each.busiest() for each in way] for way in traffic)

    def phase(name, n_bytes, inside, between):
        """One layer's."""
        total = 0.0
        for share in parts:
            knots, seconds = getattr(table, f"{name}_knots"), getattr(table, f"{name}_s")
            longest = line(n_bytes * share * inside, knots, seconds)
            if between > 0:
                knots, seconds = (getattr(table, f"{name}_far_{part}") for part in ("knots", "s"))
                longest = max(longest, line(n_bytes * share * between, knots, seconds))
            total += longest
        return total

    def moved(tier):
        """The busiest rank's bytes."""
        sent = sum(phase[tier] for phase in out) * table.dispatch_bytes
        return sent + sum(phase[tier] for phase in back) * table.combine_bytes

    replaced = prompts and choice in ("metro", "metro_sorted", "optimal")
    return Part(
        own,
        prompts,
        moe,
        [phase("dispatch", table.dispatch_bytes, *sent) for sent in out],
        [phase("combine", table.combine_bytes, *sent) for sent in back],
        0.0 if replaced else shared.choice_s,
        pairs,
        counts,
        (moved(0), moved(1)),
        [pair for _, _, experts in routed for pair in experts],
    )


def micro_batches(running, m):
    """The parts of each engine's sequences: (place, engine, who decodes, who computes)."""
    for j in range(m):
        busy = []
        for number, worker, batch, chunked in running:
            own = worker.running()
            mine = own[len(own) * j // m : len(own) * (j + 1) // m]
            part = [s for s in batch if s in mine], [s for s in chunked if s in mine]
            if any(part):
                busy.append((number, worker, *part))
        if busy:
            yield busy


def ping_pong(stages):
    """When the last of several micro-batches leaves the last layer.

    ``stages``: of each micro-batch by layer what each stage takes.
    """
    jobs = [(layer, j) for layer in range(len(stages[0])) for j in range(len(stages))]
    ends = {}
    for at, (layer, j) in enumerate(jobs):
        for stage, seconds in enumerate(stages[j][layer]):
            before = (stage - 1, layer, j) if stage else (3, layer - 1, j)
            beside = (stage, *jobs[at - 1]) if at else None
            ends[stage, layer, j] = max(ends.get(before, 0.0), ends.get(beside, 0.0)) + seconds
    return max(ends.values())


def group_step(twin, group):
    """Let the engines of a group step together; those without tokens wait."""
    pool, cost, now = group[0].pool, group[0].cost, twin.now
    shared, leader = pool.spec.group, group[0].number
    running = [(n, worker, *worker.reserve()) for n, worker in enumerate(group)]
    running = [one for one in running if one[2] or one[3]]
    n_layers = cost.n_moe_layers
    if shared.ffn_ranks:
        done = [part_of(twin, group, busy) for busy in micro_batches(running, shared.micro_batches)]
        rows = [
            sum(s.tokens for s in batch) + sum(s not in batch for s in chunked)
            for _, _, batch, chunked in running
        ]
        attention = [[*part.slowest[:2], part.slowest[3]] for part in done]
        stages = [
            [
                (sum(own) / n_layers, out, part.choosing + moe, back)
                for out, moe, back in zip(part.dispatch, part.moe, part.combine, strict=True)
            ]
            for own, part in zip(attention, done, strict=True)
        ]
        head = max(cost.head_s[n] for n in rows)
        seconds = ping_pong(stages) + head
        busy_s = head + sum(map(sum, attention))
        waits = len(running) * busy_s - sum(cost.head_s[n] for n in rows)
        waits -= sum(sum(own) - own[2] for part in done for own in part.own)
    else:
        done = [part_of(twin, group, running)]
        (part,) = done
        busy_s = sum(part.slowest)
        seconds = busy_s + sum(part.moe) + sum(part.dispatch) + sum(part.combine)
        seconds += part.choosing * n_layers
        waits = sum(busy_s - sum(own) for own in part.own)
    prompts = any(part.prompts for part in done)
    seconds = at_least_launched(cost, seconds + cost.host_s, prompts)
    end = now + (seconds + pool.capture_s) * max(worker.slowdown for worker in group)
    if twin.relocations:
        end += twin.relocations.stepped(leader, [pair for p in done for pair in p.chosen], end)

    def total(name):
        return sum(sum(getattr(part, name)) for part in done)

    twin.group_steps.append(
        {"start": now, "end": end, "own_s": busy_s, "wait_s": waits, "pool": pool.role}
        | {f"{name}_s": total(name) for name in ("moe", "dispatch", "combine")}
        | {"choice_s": sum(part.choosing * n_layers for part in done)}
        | {"inside_bytes": sum(part.moved[0] for part in done)}
        | {"between_bytes": sum(part.moved[1] for part in done)}
        | {"busiest_pairs": sum(int(part.pairs.max(axis=1).sum()) for part in done)}
        | {"pairs": sum(int(part.pairs.sum()) for part in done), "n_busy": len(running)}
    )
    group[0].last_group_step = twin.group_steps[-1]
    active = sum(sum(map(sum, part.counts)) for part in done)
    busiest = sum(sum(map(max, part.counts)) for part in done)
    group[0].group_steps += 1
    for _, worker, batch, chunked in running:
        worker.move(batch, chunked, end, active, busiest)
    for worker in group:
        worker.step_end, worker.decided = end, False
