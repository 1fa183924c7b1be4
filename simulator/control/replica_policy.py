"""A user's choice of replicas, in Python: called for each layer of a group's step, before it
is counted. Ours are compiled (`replica_choice`), a hundred times as fast, and equal to the numpy
classes here."""

from collections.abc import Sequence

import numpy as np

from eldr_sim.arrays import Array, Ints, Words
from eldr_sim.policies.placement.base import EMPTY, Placement
from eldr_sim.policies.replicas.base import ReplicaChoice, place_among_equals
from eldr_sim.simulator.control.relocation import Relocations
from eldr_sim.simulator.plane import loop
from eldr_sim.simulator.plane.steps.group_state import Groups


class ReplicaPolicy:
    """Asks a choice of replicas, and writes down what it chooses for compiled code. ``placements``:
    of each worker; a group's first counts; ``relocations``: what moves them; None: nothing."""

    def __init__(
        self,
        policy: ReplicaChoice,
        placements: Sequence[Placement],
        relocations: Relocations | None,
    ) -> None:
        self._policy, self._placements, self._relocations = policy, placements, relocations
        self._instance: dict[int, tuple[Placement, Ints]] = {}

    def answer(self, leader: int, run: loop.Run, groups: Groups) -> None:
        """Choose for the step of the group of ``leader``; raises ValueError for other slots."""
        engines, asked = run.engines, groups.replicas.asked
        number = engines.pool_of[leader]
        cost, size = groups.costs[number], int(engines.pools["group_size"][number])
        rows, homes, places, prompts = [], [], [], False
        for e in range(size):
            own, computes = rows_of(run, leader + e)
            ranks = cost.ranks_per_engine
            position, share = np.arange(len(own)), max(1, -(-len(own) // ranks))
            rows.append(own)
            homes.append(e * ranks + position // share)
            places.append(position % share)
            prompts |= computes
        words, home, place = np.concatenate(rows), np.concatenate(homes), np.concatenate(places)
        placement = self._placement(leader)
        node_of_rank = np.arange(placement.n_ranks) // cost.gpus_per_node
        layers, (n, width) = groups.work.n_chosen.shape[0], words.shape
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        bits = bits.reshape(n, layers, -1)
        chosen = np.zeros((len(asked), *bits.shape), np.uint8)
        for layer in range(layers):
            at = layer % len(placement.expert)
            token, expert = np.nonzero(bits[:, layer])
            slots = self._policy.choose(
                home, expert.reshape(n, -1), placement, at, node_of_rank, prompts
            )
            slot = np.asarray(slots).ravel()
            if slot.shape != expert.shape or (placement.expert[at][slot] != expert).any():
                raise ValueError(f"{self._policy.name!r} chooses slots without the tokens' experts")
            instance = self._instances(placement)[at, slot]
            several = instance > 0
            chosen[instance[several] - 1, token[several], layer, expert[several]] = 1
        packed = np.packbits(chosen.reshape(len(asked), n, -1), axis=2, bitorder="little")
        asked[:, home, place] = packed.view(np.uint64).reshape(len(asked), n, width)

    def _placement(self, leader: int) -> Placement:
        if self._relocations is not None and leader in self._relocations.groups:
            return self._relocations.groups[leader].placement
        return self._placements[leader]

    def _instances(self, placement: Placement) -> Ints:
        """Return which of its expert's instances each slot is, [layers, slots]."""
        known = self._instance.get(id(placement))
        if known is None or known[0] is not placement:
            found = np.stack([place_among_equals(layer) for layer in placement.expert])
            found[placement.expert == EMPTY] = 0
            known = self._instance[id(placement)] = placement, found
        return known[1]


def rows_of(run: loop.Run, w: int) -> tuple[Words, bool]:
    """Return the bit sets of the tokens of an engine's next step, in the order of `group_counting`,
    [tokens, layers * words], and whether any is a prompt's."""
    engines, width = run.engines, run.bits.shape[1]
    worker, sequences = engines.workers[w], engines.sequences[w]
    rows: list[Words] = []
    for sequence in sequences[: worker["batch"]]:
        first, span = int(sequence["row_end"] - sequence["row_span"]), int(sequence["row_span"])
        row = int(sequence["row"]) - first
        rows += [run.bits[first + (row + i) % span] for i in range(sequence["tokens"])]
    decoded = len(rows)
    last = int(worker["batch"] + worker["prefilling"])
    for sequence in sequences[int(worker["batch"] - worker["joined"]) : last]:
        begin = int(sequence["computed"])
        for at in range(begin, begin + int(sequence["chunk"])):
            rows.append(_prompt_row(run, int(sequence["request"]), at, width))
    found = np.array(rows, np.uint64) if rows else np.zeros((0, width), np.uint64)
    return found, len(rows) > decoded


def _prompt_row(run: loop.Run, request: int, at: int, width: int) -> Array:
    """Return the bit set of a token that a chunk computes: a prompt's, or one generated before."""
    record, prompts = run.engines.requests[request], run.prompts
    if at >= record["prompt_len"]:
        offset = (record["window_offset"] + at - record["prompt_len"] + 1) % record["window_len"]
        return np.asarray(run.bits[record["window_row"] + offset])
    source, block = int(record["trace_request"]), prompts.prefix_block_tokens
    if block > 0:
        first, end = prompts.prefix_indptr[request : request + 2]
        if at // block < end - first:
            source = int(prompts.prefix_trace_request[first + at // block])
    span, have = int(prompts.length[source]), prompts.bits.shape[1]
    tiles = -(-width // have)
    where = (at + np.arange(tiles) * span // tiles) % span
    return np.asarray(prompts.bits[prompts.first_row[source] + where].reshape(-1)[:width])
