"""What tokens send from rank to rank, token by token, and what a rank's MoE layer takes."""

import numpy as np


def line(x, knots, values):
    """Linear between knots, and beyond the last one."""
    i = min(max(int(np.searchsorted(knots, x, side="right")) - 1, 0), len(knots) - 2)
    slope = (values[i + 1] - values[i]) / (knots[i + 1] - knots[i])
    return values[i] + slope * (x - knots[i])


def rank_seconds(moe, pairs, activated, prompts):
    """One MoE layer of one rank."""
    table = moe.mixed_s if prompts else moe.decode_s
    return line(pairs / moe.top_k, moe.rows, table[:, activated])


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
