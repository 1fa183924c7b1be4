"""Which instance computes each of a token's experts, and which ranks and nodes a token reaches.

Ranks hold instances as bit sets, one a number of an instance; a token's experts are split likewise:
a rank computes what both have in common."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.jit import popcount
from eldr_sim.policies.replicas.base import HASH_MULTIPLIER
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.steps.bit_planes import EIGHT, add_block
from eldr_sim.simulator.plane.steps.group_state import (
    ASKED,
    EVEN,
    HASH,
    NODE,
    Counting,
    GroupScratch,
)
from eldr_sim.simulator.plane.steps.replica_choice import choose_instance

_NONE, _EVERY = np.uint64(0), ~np.uint64(0)
_FOUR = 4  # tokens that are held against what ranks hold at once


class Pass(NamedTuple):
    """What a pass over the tokens of a step counts."""

    instances: int  #: that experts have at most; with one it does not matter which token is which
    n_planes: int  #: bits that count the tokens of the step
    counts: bool  #: tokens of each instance,
    by_home: bool  #: home by home, and what is sent for each expert
    sends: bool  #: what is sent to each rank, or node


# --- which rank holds an instance ---


@compiled()
def hold_single(c: Counting) -> None:
    """Let ranks hold the experts of one instance."""
    for r in range(c.ranks):
        held, mask = c.work.held[0, r], c.masks[c.leader, r]
        for k in range(held.shape[0]):
            held[k] = mask[k]


@compiled()
def hold_placed(c: Counting) -> Any:
    """Let ranks hold all instances; return the most of an expert."""
    work, replicas, most = c.work, c.replicas, np.int64(1)
    hold_single(c)
    if replicas.multi.shape[0] > 0:
        most = np.int64(replicas.rank.shape[3])
        _clear_held(work, most, c.ranks)
        layers = work.pairs.shape[1]
        words = work.carry.shape[0] // layers
        for k in range(work.carry.shape[0]):
            many, at = replicas.multi[c.leader, k], (k // words) % replicas.rank.shape[1]
            while many != 0:
                bit = many & (~many + np.uint64(1))
                many ^= bit
                expert = (k % words) * 64 + place_of(bit)
                n = np.int64(replicas.n_instances[c.leader, at, expert])
                _hold(work, replicas.rank[c.leader, at, expert], n, k, bit)
    return most


@compiled()
def hold_chosen(c: Counting) -> Any:
    """Let ranks hold the instances that are chosen, which take turns; return the most."""
    work, most = c.work, np.int64(1)
    layers = work.pairs.shape[1]
    words = work.carry.shape[0] // layers
    hold_single(c)
    _clear_held(work, np.int64(work.held.shape[0]), c.ranks)
    for k in range(work.carry.shape[0]):
        many = work.union[0, k] & c.replicas.multi[c.leader, k]
        while many != 0:
            bit = many & (~many + np.uint64(1))
            many ^= bit
            layer, expert = k // words, (k % words) * 64 + place_of(bit)
            n = work.n_chosen[layer, expert]
            most = max(most, n)
            _hold(work, work.chosen[layer, expert], n, k, bit)
    work.next[0] = _EVERY
    work.next[1:most] = _NONE
    return most


@compiled()
def _clear_held(work: GroupScratch, instances: int, ranks: int) -> None:
    work.held[1:instances, :ranks] = _NONE
    work.n_held[0] = _EVERY
    work.n_held[1:instances] = _NONE


@compiled()
def _hold(work: GroupScratch, ranks: Any, n: int, k: int, bit: Any) -> None:
    """Let ``ranks[:n]`` hold the instances of an expert."""
    for j in range(n):
        work.held[j, ranks[j], k] |= bit
    work.n_held[0, k] &= ~bit
    work.n_held[n - 1, k] |= bit


@compiled(inline="always")
def place_of(bit: Any) -> Any:
    """Return the place of a word's only bit."""
    below: Any = popcount(bit - np.uint64(1))  # type: ignore[call-arg]
    return np.int64(below)


@compiled()
def hold_by_word(c: Counting, instances: int) -> None:
    """Write what ranks hold, and nodes together, word by word."""
    work, gpus = c.work, c.group.gpus_per_node
    words = work.carry.shape[0] // work.pairs.shape[1]
    work.held_by[c.ranks :] = _NONE
    for r in range(c.ranks):
        for j in range(instances):
            _by_word(work.held[j, r], words, work.held_by[r, j * words :])
    for at in range(c.ranks, n_targets(c)):
        for r in range((at - c.ranks) * gpus, min((at - c.ranks + 1) * gpus, c.ranks)):
            for p in range(instances * words):
                node, mine = work.held_by[at, p], work.held_by[r, p]
                for layer in range(mine.shape[0]):
                    node[layer] |= mine[layer]


# --- token by token ---


@compiled()
def take_tokens(
    bits: Any, rows: Any, n: int, c: Counting, this: Pass, home: int, place: int, weight: int
) -> None:  # fmt: skip
    """Choose instances for tokens, or count the ranks that they reach, ``weight`` times."""
    work, several = c.work, this.instances > 1
    words = work.carry.shape[0] // work.pairs.shape[1]
    for start in range(0, n, EIGHT):
        m = min(n - start, EIGHT)
        for i in range(m if several else 0):
            row, at = bits[rows[start + i]], place + start + i
            hashed = (at * HASH_MULTIPLIER) & 0xFFFFFFFF
            if c.choice >= EVEN:
                _take_turns(row, this.instances, work, i)
            elif c.choice == HASH:
                _take_hashed(row, this.instances, work.n_held, hashed, work.chosen_of, i)
            elif c.choice == ASKED:
                _take_asked(row, c.replicas.asked, home, at, work.chosen_of, i)
            else:
                _take_each(row, c, home, at, hashed, i)
        for j in range(this.instances if several and this.counts else 0):
            work.chosen_of[j, m:] = _NONE
            add_block(work.chosen_of[j], work.planes[j], 0, work.carry.shape[0], 0, this.n_planes,
                      work.carry)  # fmt: skip
        for first in range(0, m if this.sends else 0, _FOUR):
            for i in range(_FOUR):
                if first + i >= m:
                    work.token[i] = _NONE
                elif several:
                    for j in range(this.instances):
                        _by_word(work.chosen_of[j, first + i], words, work.token[i, j * words :])
                else:
                    _by_word(bits[rows[start + first + i]], words, work.token[i])
            _reach(work.token, this.instances * words, work.held_by, n_targets(c), work.hit,
                   work.reached, np.uint64(weight))  # fmt: skip


@compiled(restrict=True)
def _add_held(row: Any, held: Any, into: Any) -> None:
    for k in range(row.shape[0]):
        into[k] |= row[k] & held[k]


@compiled()
def _take_hashed(
    row: Any, instances: int, n_held: Any, hashed: int, chosen_of: Any, s: int
) -> None:
    """Give a token's experts to the instances that vLLM's hash of its place says."""
    for j in range(instances):
        into = chosen_of[j, s]
        for k in range(row.shape[0]):
            into[k] = _NONE
    for n in range(1, instances + 1):
        _add_held(row, n_held[n - 1], chosen_of[hashed % n, s])


@compiled()
def _take_asked(row: Any, asked: Any, home: int, place: int, chosen_of: Any, s: int) -> None:
    """Give a token's experts to the instances that Python has chosen, see `replica_policy`."""
    first = chosen_of[0, s]
    for k in range(row.shape[0]):
        first[k] = row[k]
    for j in range(asked.shape[0]):
        mine, into = asked[j, home, place], chosen_of[j + 1, s]
        for k in range(row.shape[0]):
            into[k] = row[k] & mine[k]
            first[k] &= ~mine[k]


@compiled()
def _take_turns(row: Any, instances: int, work: GroupScratch, s: int) -> None:
    """Give a token's experts to the instances whose turn it is; the next ones come after them."""
    on, back, first = work.carry, work.mask, work.next[0]
    for k in range(row.shape[0]):
        on[k] = back[k] = _NONE
    for j in range(instances):
        _take_turn(row, work.next[j], work.n_held[j], work.chosen_of[j, s], on, back)
    for k in range(row.shape[0]):
        first[k] |= back[k]


@compiled(restrict=True)
def _take_turn(row: Any, turn: Any, last: Any, taken: Any, on: Any, back: Any) -> None:
    """Take what it is an instance's turn to; its turn is then at what the one before hands ``on``.

    ``last``: experts that have no further instance: their turn goes ``back`` to the first."""
    for k in range(row.shape[0]):
        mine, end = turn[k], last[k]
        own = row[k] & mine
        taken[k] = own
        turn[k] = (mine & ~own) | on[k]
        on[k] = own & ~end
        back[k] |= own & end


@compiled()
def _take_each(row: Any, c: Counting, home: int, place: int, hashed: int, s: int) -> None:
    """Choose an instance for each of a token's experts."""
    work, replicas, words = c.work, c.replicas, c.work.carry.shape[0] // c.work.pairs.shape[1]
    work.chosen_of[1:, s] = _NONE
    for k in range(row.shape[0]):
        many = row[k] & ~work.n_held[0, k]
        work.chosen_of[0, s, k] = row[k] & work.n_held[0, k]
        at = (k // words) % replicas.n_instances.shape[1]
        while many != 0:
            bit = many & (~many + np.uint64(1))
            many ^= bit
            expert = (k % words) * 64 + place_of(bit)
            n = np.int64(replicas.n_instances[c.leader, at, expert])
            j = choose_instance(
                c.choice, replicas.rank[c.leader, at, expert],
                replicas.weight[c.leader, at, expert], n, c.group.gpus_per_node, home, hashed,
                (place << 40) | (home << 28) | (at << 16) | expert,
            )  # fmt: skip
            work.chosen_of[j, s, k] |= bit


@compiled()
def _by_word(row: Any, words: int, out: Any) -> None:
    """Write ``[layers * words]`` to ``out [words or more, layers]``."""
    layers = out.shape[1]
    if words == 2:  # most models have 65 to 128 experts
        first, second = out[0], out[1]
        for layer in range(layers):
            first[layer] = row[2 * layer]
            second[layer] = row[2 * layer + 1]
        return
    for word in range(words):
        into = out[word]
        for layer in range(layers):
            into[layer] = row[words * layer + word]


@compiled()
def n_targets(c: Counting) -> Any:
    """Return where a token can go: ranks, and nodes behind them."""
    if c.group.copy_per == NODE and c.ranks > c.group.gpus_per_node:
        return c.ranks + (c.ranks + c.group.gpus_per_node - 1) // c.group.gpus_per_node
    return c.ranks


@compiled()
def _reach(
    token: Any, parts: int, held_by: Any, targets: int, hit: Any, reached: Any, weight: Any
) -> None:
    """Count the layers in which targets hold experts of each of four tokens.

    ``token``, ``parts``: uint64 ``[4, parts, layers]``, padded with empty parts to an even number;
    ``held_by``: uint64 ``[targets or more, parts, layers]``; ``hit``: ``[4, layers]``, working
    memory; ``reached``: uint64 ``[targets or more, layers]``, to which ``weight`` is added."""
    a, b, c, d = token[0], token[1], token[2], token[3]
    e, f, g, h = hit[0], hit[1], hit[2], hit[3]
    hit[:] = _NONE
    for r in range(targets):
        held, n = held_by[r], reached[r]
        if parts <= 2:
            _count_met(a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1], held[0], held[1], weight, n)
            continue
        for p in range(0, parts, 2):
            x, y = held[p], held[p + 1]
            _meet(a[p], a[p + 1], x, y, e)
            _meet(b[p], b[p + 1], x, y, f)
            _meet(c[p], c[p + 1], x, y, g)
            _meet(d[p], d[p + 1], x, y, h)
        _count_hits(e, f, g, h, weight, n)


@compiled(restrict=True)
def _meet(a: Any, b: Any, x: Any, y: Any, hit: Any) -> None:
    for layer in range(hit.shape[0]):
        hit[layer] |= (a[layer] & x[layer]) | (b[layer] & y[layer])


@compiled(restrict=True)
def _count_hits(a: Any, b: Any, c: Any, d: Any, weight: Any, reached: Any) -> None:
    one = np.uint64(1)
    for layer in range(reached.shape[0]):
        n = min(a[layer], one) + min(b[layer], one) + min(c[layer], one) + min(d[layer], one)
        reached[layer] += weight * n
        a[layer] = b[layer] = c[layer] = d[layer] = _NONE


@compiled(restrict=True)
def _count_met(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, x: Any, y: Any, weight: Any,
    reached: Any,
) -> None:  # fmt: skip
    one = np.uint64(1)
    for layer in range(reached.shape[0]):
        v, w = x[layer], y[layer]
        n = min((a[layer] & v) | (b[layer] & w), one) + min((c[layer] & v) | (d[layer] & w), one)
        n += min((e[layer] & v) | (f[layer] & w), one) + min((g[layer] & v) | (h[layer] & w), one)
        reached[layer] += weight * n
