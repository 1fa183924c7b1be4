"""Experts that move while a run lasts, expert by expert: an extension of the reference model."""

from collections import Counter

import numpy as np

from eldr_sim.simulator.reference.group import ExpertGroup
from eldr_sim.simulator.reference.worker import Colocated, Decoder, Prefiller


class SlowRelocations:
    """Remembers every step's tokens; takes what `Relocations` takes."""

    def __init__(self, rule, groups, n_layers, n_experts):
        self.rule, self.n_layers, self.n_experts = rule, n_layers, n_experts
        self.groups = {group.first: group for group in groups}
        self.placements = {group.first: group.placement for group in groups}
        self.steps = {group.first: [] for group in groups}
        self.under_way = {}
        self.log = []

    def placement(self, leader, now):
        """Where the experts of a group are in a step that starts now; None: where they were."""
        if leader in self.under_way and now >= self.under_way[leader][0]:
            _, placement, entry = self.under_way.pop(leader)
            self.placements[leader], entry["in_force_s"] = placement, now
        return self.placements.get(leader)

    def stepped(self, leader, tokens, end):
        """Count a step's (layer, expert) pairs; the seconds that the group waits after it."""
        if leader not in self.groups:
            return 0.0
        steps, rule = self.steps[leader], self.rule
        steps.append(Counter(tokens))
        after_first = len(steps) - max(1, rule.interval // 4)
        if after_first < 0 or after_first % rule.interval or leader in self.under_way:
            return 0.0
        group, before = self.groups[leader], self.placements[leader]
        n_trace = len(before.expert)
        load = np.zeros((n_trace, self.n_experts), np.int64)
        for counted in steps[-rule.window :]:
            for (layer, expert), n in counted.items():
                load[layer % n_trace, expert] += n
        after = group.policy.update(group.group, load, before)
        if after is None:
            return 0.0
        moved = self.moves(before, after, group.links.gpus_per_node)
        seconds = rule.overhead_s
        tiers = Counter()
        for layer in range(self.n_layers):
            busy = Counter()
            for at, source, to in moved:
                if at == layer % n_trace:
                    inside = source // group.links.gpus_per_node == to // group.links.gpus_per_node
                    tier = "inside" if inside else "between"
                    for end_of_link in (("from", source), ("to", to)):
                        busy[tier, end_of_link] += group.links.expert_bytes
                    tiers[tier] += group.links.expert_bytes
                    tiers["experts"] += 1
            seconds += max(
                [
                    n_bytes / getattr(group.links, tier) for (tier, _), n_bytes in busy.items()
                ],
                default=0.0,
            )  # fmt: skip
        entry = {
            "asked_s": end, "in_force_s": -1.0, "transfer_s": seconds, "experts": tiers["experts"],
            "inside_bytes": tiers["inside"], "between_bytes": tiers["between"],
            "stall_s": 0.0 if rule.asynchronous else seconds,
            "pool": group.pool, "group": group.number,
        }  # fmt: skip
        self.log.append(entry)
        if rule.asynchronous:
            self.under_way[leader] = end + seconds, after, entry
        else:
            self.placements[leader], entry["in_force_s"] = after, end + seconds
        return entry["stall_s"]

    @staticmethod
    def moves(before, after, gpus_per_node):
        """(layer, from, to) of each expert that comes to a rank which had no instance of it."""
        moved = []
        for layer in range(len(before.expert)):
            holders, wanted = {}, {}
            for placement, found in ((before, holders), (after, wanted)):
                pairs = zip(placement.expert[layer], placement.rank[layer], strict=True)
                for expert, rank in pairs:
                    found.setdefault(int(expert), set()).add(int(rank))
            turns = Counter()
            for expert, ranks in wanted.items():
                for to in sorted(ranks - holders[expert]):
                    node = to // gpus_per_node
                    near = sorted(r for r in holders[expert] if r // gpus_per_node == node)
                    sources = near or sorted(holders[expert])
                    asker = (expert, node) if near else expert
                    moved.append((layer, sources[turns[asker] % len(sources)], to))
                    turns[asker] += 1
        return moved


def relocating(relocations):
    """Return the classes of workers whose groups move their experts: for prefill and decode."""

    class RelocatingGroup(ExpertGroup):
        def step(self):
            moved = relocations.placement(self.engines[0].number, self.env.now)
            self.placement = moved or self.placement
            super().step()

        def relocated(self, busy, end):
            tokens = [
                pair
                for engine, batch in busy.items()
                for rows in engine.experts(*batch)
                for _, *pair in np.argwhere(self.chosen(rows)).tolist()
            ]
            return relocations.stepped(self.engines[0].number, map(tuple, tokens), end)

    def of(worker):
        return type(worker.__name__, (worker,), {"group_class": RelocatingGroup})

    return of(Prefiller), of(Decoder), of(Colocated)
