"""A step of engines that share experts, token by token."""

from __future__ import annotations

import numpy as np

from .step_seconds import chunk_attention_seconds, decode_attention_seconds


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


class Traffic:
    """What the tokens of one layer send from rank to rank."""

    def __init__(self, n_ranks, per_engine, gpus_per_node, copy_per):
        self.n_ranks, self.per_engine, self.gpus_per_node = n_ranks, per_engine, gpus_per_node
        self.copy_per = copy_per
        self.sends = []  # (from rank, to rank, copies)

    def node(self, rank):
        return rank // self.gpus_per_node

    def token(self, engine, ranks):
        """Send a token whose experts lie on ``ranks``, one entry an expert.

        The ranks of its engine each send an equal part of its tokens.
        """
        part = 1.0 / self.per_engine
        for home in range(engine * self.per_engine, (engine + 1) * self.per_engine):
            if self.copy_per == "all":
                targets = [rank for rank in range(self.n_ranks) if rank != home]
            elif self.copy_per == "expert":
                targets = [rank for rank in ranks if rank != home]
            else:
                targets = [rank for rank in sorted(set(ranks)) if rank != home]
            if self.copy_per != "node":
                self.sends += [(home, rank, part) for rank in targets]
                continue
            for node in {self.node(rank) for rank in ranks}:
                door = home % self.gpus_per_node + node * self.gpus_per_node
                if node != self.node(home):
                    self.sends.append((home, door, part))
                else:
                    door = home
                self.sends += [
                    (door, rank, part)
                    for rank in sorted(set(ranks))
                    if self.node(rank) == node and rank != door
                ]

    def busiest(self):
        """The most copies a rank sends or receives, inside its node and between nodes."""
        if self.copy_per == "all":
            return self.busiest_all()
        inside, between = np.zeros((2, self.n_ranks)), np.zeros((2, self.n_ranks))
        for home, rank, part in self.sends:
            tier = inside if self.node(home) == self.node(rank) else between
            tier[0, home] += part
            tier[1, rank] += part
        return inside.max(), between.max()

    def busiest_all(self):
        """Gathered: inside it gets all others' tokens, between nodes shared by the node's GPUs."""
        got = np.zeros(self.n_ranks)
        homes = np.zeros(self.n_ranks)
        for home, rank, part in self.sends:
            got[rank] += part
            homes[home] += part / max(1, self.n_ranks - 1)
        between = 0.0
        for node in {self.node(rank) for rank in range(self.n_ranks)}:
            members = [rank for rank in range(self.n_ranks) if self.node(rank) == node]
            others = homes.sum() - homes[members].sum()
            between = max(between, others / len(members))
        return got.max(), between


def group_step(twin, group):
    """Let the engines of a group step together; those without tokens wait."""
    pool, cost, now = group[0].pool, group[0].cost, twin.now
    shared = pool.spec.group
    per_engine = shared.ranks_per_engine
    n_ranks = len(group) * per_engine
    copy_per = ("all", "expert", "rank", "node")[shared.copy_per]
    layers = range(cost.n_moe_layers)
    traffic = [Traffic(n_ranks, per_engine, shared.gpus_per_node, copy_per) for _ in layers]
    pairs = np.zeros((len(layers), n_ranks), int)
    activated = [[set() for _ in range(n_ranks)] for _ in layers]
    busy, own = [], []
    for number, worker in enumerate(group):
        batch, chunked = worker.reserve()
        if not batch and not chunked:
            continue
        chunks = [(s.cached, s.chunk) for s in chunked]
        tokens = len(batch) + sum(n for _, n in chunks)
        rows = len(batch) + sum(s not in batch for s in chunked)
        context = sum(s.context + 1 for s in batch)
        own.append(own_seconds(cost, len(batch), context, chunks, tokens, rows))
        busy.append((worker, batch, chunked))
        for experts in worker.token_experts(batch, chunked):
            for layer in layers:
                chosen = sorted(expert for at, expert in experts if at == layer)
                homes = [
                    next(r for r in range(n_ranks) if (layer, e) in group[0].ranks[r])
                    for e in chosen
                ]
                for expert, rank in zip(chosen, homes, strict=True):
                    pairs[layer, rank] += 1
                    activated[layer][rank].add(expert)
                traffic[layer].token(number, homes)
    prompts = any(chunked for _, _, chunked in busy)
    counts = [[len(found) for found in activated[layer]] for layer in layers]
    moe = sum(
        max(
            rank_seconds(shared.moe, pairs[layer, r], counts[layer][r], prompts)
            if pairs[layer, r]
            else 0.0
            for r in range(n_ranks)
        )
        for layer in layers
    )
    table, sent = shared.all_to_all, [each.busiest() for each in traffic]

    def phase(name, n_bytes):
        total = 0.0
        for inside, between in sent:
            knots, seconds = getattr(table, f"{name}_knots"), getattr(table, f"{name}_s")
            longest = line(n_bytes * inside, knots, seconds)
            if between > 0:
                knots, seconds = (getattr(table, f"{name}_far_{part}") for part in ("knots", "s"))
                longest = max(longest, line(n_bytes * between, knots, seconds))
            total += longest
        return total

    dispatch = phase("dispatch", table.dispatch_bytes)
    combine = phase("combine", table.combine_bytes)
    slowest = [max(part) for part in zip(*own, strict=True)]
    seconds = sum(slowest) + cost.host_s + moe + dispatch + combine
    end = now + (seconds + pool.capture_s)
    both = table.dispatch_bytes + table.combine_bytes
    twin.group_steps.append(
        {"start": now, "end": end, "moe_s": moe, "dispatch_s": dispatch, "combine_s": combine}
        | {"wait_s": sum(sum(slowest) - sum(parts) for parts in own)}
        | {"inside_bytes": both * sum(inside for inside, _ in sent)}
        | {"between_bytes": both * sum(between for _, between in sent)}
        | {"busiest_pairs": int(pairs.max(axis=1).sum()), "pairs": int(pairs.sum())}
        | {"n_busy": len(busy), "pool": pool.role}
    )
    active = sum(map(sum, counts))
    busiest = sum(map(max, counts))
    for worker, batch, chunked in busy:
        worker.move(batch, chunked, end, active, busiest)
    for worker in group:
        worker.step_end, worker.decided = end, False
