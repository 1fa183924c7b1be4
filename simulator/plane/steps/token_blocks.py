"""Tokens of a group's step, 64 at once: which rank computes each of a token's experts that has
several instances, and which ranks and nodes a token reaches.

A block of bit sets is transposed, so that each expert has a word of the tokens that choose it. Then
what a rank's experts have in common is one word for 64 tokens, and instances share out the bits of
an expert's word: in turn, or each token by itself. Blocks do not end with a home rank, of which a
word says which tokens are at home there."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.jit import lowest, popcount
from eldr_sim.kernel_profiles.kernels import all_to_all_cost
from eldr_sim.policies.replicas.base import HASH_MULTIPLIER
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.steps.group_state import (
    ASKED,
    EVEN,
    HASH,
    METRO,
    NODE,
    OPTIMAL,
    RANK,
    TOKENS,
    Counting,
)
from eldr_sim.simulator.plane.steps.replica_choice import choose_instance

_NONE, _ONE = np.uint64(0), np.uint64(1)
#: Where ``GroupScratch.filled`` has the tokens of a block and how many each stands for.
_FILLED, _WEIGHT = 0, 1
#: A mark of the last four words of a rank.
_LAST = np.uint32(1 << 31)
#: Distances in a block and the bits that stay, see `transpose`.
_HALVES = (
    (np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
    (np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(4), np.uint64(0x0F0F0F0F0F0F0F0F)),
    (np.uint64(2), np.uint64(0x3333333333333333)),
    (np.uint64(1), np.uint64(0x5555555555555555)),
)


class Pass(NamedTuple):
    """What a pass over the tokens of a step counts."""

    n_planes: int  #: bits that count the tokens of the step
    counts: bool  #: tokens of each expert,
    by_home: bool  #: home by home, and what is sent for each expert
    blocks: bool  #: what is sent to each rank, or node, or what instances compute


# --- what ranks hold ---


@compiled()
def list_experts(c: Counting) -> None:
    """List the experts of each rank, and those of several instances, unless it has been done."""
    work, multi = c.work, c.replicas.multi
    known, changed = work.known[c.leader], False
    for r in range(c.ranks):
        changed = _renew(known[r], c.masks[c.leader, r]) or changed
    if multi.shape[0] > 0:
        many = c.replicas.many[c.leader]
        for k in range(many.shape[0]):
            work.mask[k] = multi[c.leader, k] & ~many[k]
        changed = _renew(known[c.ranks], work.mask) or changed
        changed = _renew(known[c.ranks + 1], many) or changed
    if not changed:
        return
    layers = work.pairs.shape[1]
    words = work.carry.shape[0] // layers
    for layer in range(layers):
        n, listed = np.int64(0), work.listed[c.leader, layer]
        for r in range(c.ranks + 2):
            first = n
            for k in range(words):
                left = known[r, layer * words + k]
                while left != 0:
                    place = lowest(left)
                    left &= left - _ONE
                    at = place * work.carry.shape[0] + layer * words + k
                    listed[n] = at if r < c.ranks else k * 64 + place
                    n += 1
            if r < c.ranks:
                while n == first or n % 4 > 0:
                    listed[n] = work.block_words.shape[0] - 1  # which is no expert's
                    n += 1
                listed[n - 4] |= _LAST
            work.n_listed[c.leader, layer, r] = n


@compiled(restrict=True)
def _renew(known: Any, now: Any) -> Any:
    """Let words be as they are now; return whether they were others."""
    changed = _NONE
    for k in range(known.shape[0]):
        changed |= known[k] ^ now[k]
        known[k] = now[k]
    return changed != 0


# --- filling ---


@compiled()
def begin_blocks(c: Counting) -> None:
    """Begin a pass over the tokens of a step."""
    work = c.work
    list_experts(c)
    work.filled[_FILLED] = 0
    work.at_home[:] = _NONE
    if c.replicas.multi.shape[0] == 0:
        return
    work.near[: c.ranks] = 0.0
    work.copied[:, : c.ranks] = 0
    listed = work.n_listed[c.leader]
    for j in range(1 if c.choice >= EVEN else work.taken.shape[0]):
        for layer in range(work.pairs.shape[1]):
            work.taken[j, layer, : listed[layer, c.ranks + 1] - listed[layer, c.ranks - 1]] = 0


@compiled(inline="always")  # handing `Counting` over takes long
def take_row(row: Any, c: Counting, home: int, place: int, weight: int) -> None:
    """Take a token, ``weight`` times, in its place of a home rank."""
    work = c.work
    n = work.filled[_FILLED]
    if n > 0 and (n == TOKENS or work.filled[_WEIGHT] != weight):
        end_block(c)
        n = np.int64(0)
    into = work.block[n]
    for k in range(into.shape[0]):
        into[k] = row[k]
    work.at_home[home] |= _ONE << np.uint64(n)
    work.home_of[n], work.place_of[n] = home, place
    work.filled[_FILLED], work.filled[_WEIGHT] = n + 1, weight


@compiled()
def end_block(c: Counting) -> None:
    """Count the tokens of a block, which is empty then."""
    work, n = c.work, c.work.filled[_FILLED]
    if n == 0:
        return
    work.block[n:] = _NONE
    transpose(work.block)
    first, last = work.home_of[0], work.home_of[n - 1]
    sends = c.group.copy_per == RANK or c.group.copy_per == NODE
    several = c.replicas.multi.shape[0] > 0
    if several and c.choice == HASH:
        _hash_places(work.place_of[:n], work.hashed)
    listed = work.listed[c.leader]
    for layer in range(work.pairs.shape[1]):
        if sends:
            _meet(work.block_words, listed[layer], c.ranks, work.met, layer)
        if several:
            _split_layer(c, layer, sends)
    if sends:
        _send(c, first, last)
    work.at_home[first : last + 1] = _NONE
    work.filled[_FILLED] = 0


@compiled()
def transpose(block: Any) -> None:
    """Transpose the bits of uint64 ``[64, words]`` in each column of words."""
    for i in range(8):
        _exchange(
            block[i], block[i + 8], block[i + 16], block[i + 24], block[i + 32], block[i + 40],
            block[i + 48], block[i + 56], _HALVES[0], _HALVES[1], _HALVES[2],
        )  # fmt: skip
    for i in range(0, TOKENS, 8):
        _exchange(
            block[i], block[i + 1], block[i + 2], block[i + 3], block[i + 4], block[i + 5],
            block[i + 6], block[i + 7], _HALVES[3], _HALVES[4], _HALVES[5],
        )  # fmt: skip


@compiled(restrict=True)
def _exchange(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, far: Any, middle: Any, near: Any
) -> None:
    """Exchange bits of eight rows at three distances."""
    for k in range(a.shape[0]):
        r, s, t, u, v, w, x, y = a[k], b[k], c[k], d[k], e[k], f[k], g[k], h[k]
        r, v = _swap(r, v, far)
        s, w = _swap(s, w, far)
        t, x = _swap(t, x, far)
        u, y = _swap(u, y, far)
        r, t = _swap(r, t, middle)
        s, u = _swap(s, u, middle)
        v, x = _swap(v, x, middle)
        w, y = _swap(w, y, middle)
        r, s = _swap(r, s, near)
        t, u = _swap(t, u, near)
        v, w = _swap(v, w, near)
        x, y = _swap(x, y, near)
        a[k], b[k], c[k], d[k], e[k], f[k], g[k], h[k] = r, s, t, u, v, w, x, y


@compiled(inline="always")
def _swap(low: Any, high: Any, half: Any) -> Any:
    """Exchange the upper halves of one word with the lower ones of the other."""
    moved = ((low >> half[0]) ^ high) & half[1]
    return low ^ (moved << half[0]), high ^ moved


# --- ranks that tokens reach ---


@compiled()
def _meet(words: Any, listed: Any, ranks: int, met: Any, layer: int) -> None:
    """Write which tokens each rank's experts have in a layer."""
    first = np.int64(0)
    for r in range(ranks):
        tokens = _NONE
        while True:  # by fours; to gather words in vector registers takes twice as long
            at = listed[first]
            tokens |= words[np.uint64(at & ~_LAST)] | words[np.uint64(listed[first + 1])]
            tokens |= words[np.uint64(listed[first + 2])] | words[np.uint64(listed[first + 3])]
            first += 4
            if at & _LAST:
                break
        met[r, layer] = tokens


@compiled()
def n_targets(c: Counting) -> Any:
    """Return where a token can go: ranks, and nodes behind them."""
    if c.group.copy_per == NODE and c.ranks > c.group.gpus_per_node:
        return c.ranks + (c.ranks + c.group.gpus_per_node - 1) // c.group.gpus_per_node
    return c.ranks


@compiled()
def _send(c: Counting, first: int, last: int) -> None:
    """Count copies of a block's tokens for each rank, and each node, that they reach."""
    work, gpus = c.work, c.group.gpus_per_node
    weight, copies, traffic = np.uint64(work.filled[_WEIGHT]), work.copies, work.traffic
    work.met[c.ranks :] = _NONE
    for r in range(c.ranks if n_targets(c) > c.ranks else 0):
        _add_bits(work.met[c.ranks + r // gpus], work.met[r])
    for home in range(first, last + 1):
        own, place, here = home // gpus, home % gpus, work.at_home[home]
        if here == 0:
            continue
        for r in range(c.ranks):
            if c.group.copy_per == RANK and r == home:
                continue
            _count_bits(work.met[r], here, weight, copies)
            if c.group.copy_per == RANK:
                all_to_all_cost.add_direct(traffic, home, r, copies, gpus)
            else:
                all_to_all_cost.add_forwarded(traffic, r // gpus * gpus + place, r, copies)
        for node in range(n_targets(c) - c.ranks):
            if node != own:
                _count_bits(work.met[c.ranks + node], here, weight, copies)
                all_to_all_cost.add_to_node(traffic, home, node * gpus + place, copies)


@compiled(restrict=True)
def _add_bits(into: Any, bits: Any) -> None:
    for k in range(into.shape[0]):
        into[k] |= bits[k]


@compiled(restrict=True)
def _count_bits(bits: Any, mask: Any, weight: Any, counts: Any) -> None:
    for k in range(counts.shape[0]):
        n: Any = popcount(bits[k] & mask) * weight
        counts[k] = np.float64(np.int64(n))


# --- experts of several instances ---


@compiled()
def _hash_places(places: Any, hashed: Any) -> None:
    """Write which tokens vLLM's hash gives to each of 2, 3 ... instances: ``hashed [n, j]``."""
    hashed[:] = _NONE
    for i in range(places.shape[0]):
        value = (places[i] * HASH_MULTIPLIER) & 0xFFFFFFFF
        for n in range(2, hashed.shape[0]):
            hashed[n, value % n] |= _ONE << np.uint64(i)


@compiled(inline="always")
def _split_layer(c: Counting, layer: int, sends: bool) -> None:
    """Share the tokens of a layer's experts of several instances out over these."""
    work, replicas, at = c.work, c.replicas, layer % c.replicas.n_instances.shape[1]
    width = work.carry.shape[0]
    word = layer * (width // work.pairs.shape[1])
    end = work.n_listed[c.leader, layer, c.ranks - 1 : c.ranks + 2]
    numbers = work.listed[c.leader, layer, end[0] : end[2]]
    n_of, ranks_of = replicas.n_instances[c.leader, at], replicas.rank[c.leader, at]
    if METRO <= c.choice <= OPTIMAL:
        _follow(work.block_words, numbers, width, word, work.chosen[0, layer], work.met, layer)
        return
    by_count, far = c.choice >= EVEN, c.ranks > c.group.gpus_per_node
    if (c.choice == EVEN or c.choice == HASH) and (sends or not far):
        _halve(
            work.block_words, numbers, end[1] - end[0], width, word, ranks_of, work.hashed[2, 0],
            by_count, work.taken, sends, work.met, layer, work.at_home, work.copied[layer],
        )  # fmt: skip
        _share(
            work.block_words, numbers, end[1] - end[0], width, word, n_of, ranks_of, work.hashed,
            by_count, work.taken, sends, work.met, layer, work.at_home, work.copied[layer],
            work.split,
        )  # fmt: skip
        return
    for i in range(numbers.shape[0]):
        expert = np.int64(numbers[i])
        tokens = work.block[expert & 63, word + (expert >> 6)]
        if tokens == 0:
            continue
        n, start = np.int64(n_of[expert]), np.int64(0)
        if by_count:
            if c.choice > EVEN:
                n = work.n_chosen[layer, expert]
            start = work.taken[0, layer, i] % n
            work.taken[0, layer, i] += np.int64(popcount(tokens))
            _take_turns(tokens, n, work.split)
        elif c.choice == HASH:
            for j in range(n):
                work.split[j] = tokens & work.hashed[n, j]
        else:
            _take_each(c, layer, expert, tokens, n)
        for k in range(n):
            turn: Any = start + k
            if turn >= n:
                turn -= n
            mine, rank = work.split[k], np.int64(ranks_of[expert, turn])
            if c.choice > EVEN:
                rank = work.chosen[turn, layer, expert]
            if not by_count:
                work.taken[turn, layer, i] += np.int64(popcount(mine))
            if sends:
                work.met[rank, layer] |= mine
            else:
                own = popcount(mine & work.at_home[rank])
                work.copied[layer, rank] += np.int64(own)
                if far:
                    _keep_near(
                        work.near, work.traffic, work.at_home[: c.ranks], layer, rank,
                        c.group.gpus_per_node, mine,
                    )  # fmt: skip


@compiled(inline="always")
def _word_of(expert: Any, width: int, word: int) -> Any:
    """Return where a block has the tokens of an expert of the layer that begins at ``word``."""
    column = np.uint64(word) + (expert >> np.uint64(6))
    return (expert & np.uint64(63)) * np.uint64(width) + column


@compiled(restrict=True)
def _follow(
    words: Any, numbers: Any, width: int, word: int, chosen: Any, met: Any, layer: int
) -> None:
    """Let the tokens of experts reach the ranks that alone compute these."""
    for i in range(numbers.shape[0]):
        expert = np.uint64(numbers[i])
        met[np.uint64(chosen[expert]), layer] |= words[_word_of(expert, width, word)]


@compiled(restrict=True)
def _halve(
    words: Any, numbers: Any, n_two: int, width: int, word: int, ranks_of: Any, even: Any,
    in_turn: bool, taken: Any, sends: bool, met: Any, layer: int, at_home: Any, copied: Any,
) -> None:  # fmt: skip
    """Share the tokens of the ``n_two`` experts of two instances out, in turn or by hash, which
    gives the ``even`` ones to the first."""
    for i in range(n_two):
        expert = np.uint64(numbers[i])
        tokens = words[_word_of(expert, width, word)]
        first = tokens & even
        if in_turn:
            before, first = taken[0, layer, i], _odd(tokens)
            if before & 1:
                first ^= tokens
            taken[0, layer, i] = before + np.int64(popcount(tokens))
        second = tokens ^ first
        if not in_turn:
            taken[0, layer, i] += np.int64(popcount(first))
            taken[1, layer, i] += np.int64(popcount(second))
        one, other = np.uint64(ranks_of[expert, 0]), np.uint64(ranks_of[expert, 1])
        if sends:
            met[one, layer] |= first
            met[other, layer] |= second
        else:
            copied[one] += np.int64(popcount(first & at_home[one]))
            copied[other] += np.int64(popcount(second & at_home[other]))


@compiled(restrict=True)
def _share(
    words: Any, numbers: Any, n_two: int, width: int, word: int, n_of: Any, ranks_of: Any,
    hashed: Any, in_turn: bool, taken: Any, sends: bool, met: Any, layer: int, at_home: Any,
    copied: Any, split: Any,
) -> None:  # fmt: skip
    """Do the same for the others."""
    for i in range(n_two, numbers.shape[0]):
        expert = np.uint64(numbers[i])
        tokens, n, start = words[_word_of(expert, width, word)], np.int64(n_of[expert]), np.int64(0)
        if in_turn:
            start = taken[0, layer, i] % n
            taken[0, layer, i] += np.int64(popcount(tokens))
            _take_turns(tokens, n, split)
        for j in range(n):
            mine, turn = split[j], start + j
            if not in_turn:
                mine = tokens & hashed[n, j]
                taken[j, layer, i] += np.int64(popcount(mine))
            if turn >= n:
                turn -= n
            rank = np.uint64(ranks_of[expert, turn])
            if sends:
                met[rank, layer] |= mine
            else:
                copied[rank] += np.int64(popcount(mine & at_home[rank]))


@compiled(inline="always")
def _odd(tokens: Any) -> Any:
    """Return the first token, the third, the fifth and so on."""
    odd = tokens  # becomes the parity of how many there are up to each
    odd ^= odd << np.uint64(1)
    odd ^= odd << np.uint64(2)
    odd ^= odd << np.uint64(4)
    odd ^= odd << np.uint64(8)
    odd ^= odd << np.uint64(16)
    odd ^= odd << np.uint64(32)
    return tokens & odd


@compiled()
def _take_turns(tokens: Any, n: int, split: Any) -> None:
    """Share tokens out over ``n`` instances in turn."""
    if n == 4:
        one, other = _odd(tokens), tokens ^ _odd(tokens)
        split[0], split[1] = _odd(one), _odd(other)
        split[2], split[3] = one ^ split[0], other ^ split[1]
        return
    if n == 3:
        one, two = tokens, _NONE  # become the remainders of how many there are up to each
        for i in range(6):
            more, most = one << (_ONE << np.uint64(i)), two << (_ONE << np.uint64(i))
            none, no_more = ~(one | two), ~(more | most)
            one, two = (
                (one & no_more) | (none & more) | (two & most),
                (two & no_more) | (none & most) | (one & more),
            )
        split[0], split[1], split[2] = tokens & one, tokens & two, tokens & ~(one | two)
        return
    split[:n] = _NONE
    while tokens != 0:
        for j in range(n):
            lowest = tokens & (_NONE - tokens)
            split[j] |= lowest
            tokens ^= lowest


@compiled(inline="always")
def _take_each(c: Counting, layer: int, expert: int, tokens: Any, n: int) -> None:
    """Choose an instance for each token of an expert."""
    work, replicas, at = c.work, c.replicas, layer % c.replicas.n_instances.shape[1]
    words = work.carry.shape[0] // work.pairs.shape[1]
    word, shift = layer * words + expert // 64, np.uint64(expert % 64)
    work.split[:n] = _NONE
    while tokens != 0:
        i = lowest(tokens)
        tokens &= tokens - _ONE
        home, place, j = work.home_of[i], work.place_of[i], np.int64(0)
        if c.choice == ASKED:
            for other in range(n - 1):
                if (replicas.asked[other, home, place, word] >> shift) & _ONE:
                    j = np.int64(other + 1)
        else:
            j = choose_instance(
                c.choice, replicas.rank[c.leader, at, expert],
                replicas.weight[c.leader, at, expert], n, c.group.gpus_per_node, home,
                (place * HASH_MULTIPLIER) & 0xFFFFFFFF,
                (place << 40) | (home << 28) | (at << 16) | expert,
            )  # fmt: skip
        work.split[j] |= _ONE << np.uint64(i)


@compiled()
def _keep_near(
    near: Any, traffic: Any, at_home: Any, layer: int, rank: int, gpus: int, tokens: Any
) -> None:
    """Count the tokens of an instance that are at home on its node."""
    first = rank // gpus * gpus
    for home in range(first, min(first + gpus, at_home.shape[0])):
        n = np.float64(np.int64(popcount(tokens & at_home[home])))
        near[rank, layer] += n
        traffic[all_to_all_cost.SENT_FAR, home, layer] -= n
        traffic[all_to_all_cost.SENT, home, layer] += n
