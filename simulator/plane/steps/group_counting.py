"""Where the tokens of a group's step go: pairs, activated experts and copies, rank by rank.

Tokens are counted from the experts of each, in bit planes: one carry-save addition counts 64
experts at once. Most steps count the tokens of each expert over the whole group first. From them
choices by count decide, and pairs and activated experts follow. Where copies are sent by rank or
node, or by expert from chosen instances, a second pass finds out which ranks each token reaches.

Choices that depend on the token, and copies for each expert where there are no instances to choose,
are counted home rank by home rank in one pass, beside the first in steps that relocations count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eldr_sim.jit import popcount
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import add_direct, add_forwarded, add_to_node
from eldr_sim.policies.replicas.base import HASH_MULTIPLIER
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.engine import Engines
from eldr_sim.simulator.plane.steps.expert_loads import ExpertLoads, add_counts
from eldr_sim.simulator.plane.steps.group_state import (
    ALL,
    ASKED,
    BY_HOME,
    COPIES,
    EVEN,
    EXPERT,
    NODE,
    RANK,
    TOTALS,
    Counting,
    GroupScratch,
)
from eldr_sim.simulator.plane.steps.replica_choice import (
    asked_instance,
    choose_instance,
    choose_instances,
)

#: Ranks from which on that of an expert is looked up; fewer are searched 64 experts at once.
_WIDE = 16


@compiled()
def count_step(
    engines: Engines, size: int, bits: Any, prompts: Any, c: Counting, loads: ExpertLoads
) -> None:
    """Count what the engines of a group compute in their step, into ``c.work``.

    Parameters
    ----------
    engines, bits, prompts
        As of `group_step.group_step`.
    size
        Engines of the group.
    c
        What counting needs; ``counts`` does not matter.
    loads
        Where the tokens of each expert are added up if the step counts for a relocation.
    """
    _clear(c.work, c.ranks)
    several = c.replicas.multi.shape[0] > 0
    by_home = (several and c.choice < EVEN) or (not several and c.group.copy_per == EXPERT)
    relocates = loads.part[c.leader] >= 0
    if relocates or not by_home:
        _count_group(engines, size, bits, prompts, _of_pass(c, TOTALS))
    if relocates:
        n_planes = _n_planes(c.work.tokens[: c.ranks].sum())
        add_counts(loads, c.leader, c.work.planes, n_planes)
    if by_home:
        c.work.tokens[:] = 0
        c.work.used[:] = False
        _find_owners(c.work, c.masks[c.leader], c.ranks)
        _count_group(engines, size, bits, prompts, _of_pass(c, BY_HOME))
        return
    settle_totals(c)
    if c.group.copy_per != ALL:
        c.work.tokens[:] = 0
        _find_owners(c.work, c.work.active, c.ranks)
        _count_group(engines, size, bits, prompts, _of_pass(c, COPIES))


@compiled()
def count_rows(bits: Any, rows: Any, c: Counting) -> None:
    """Count a step of tokens that all go to every rank, into ``c.work``.

    Parameters
    ----------
    bits
        uint64 ``[rows, layers * words]``: the experts of tokens.
    rows
        int64: those of the step, which lie on the ranks in turn.
    c
        What counting needs.
    """
    _clear(c.work, c.ranks)
    c.work.planes[: _n_planes(rows.shape[0])] = 0
    for i in range(rows.shape[0]):
        c.work.tokens[i % c.ranks] += 1
        for k in range(bits.shape[1]):
            _add_word(c.work.planes, 0, k, bits[rows[i], k])
    settle_totals(c)


@compiled()
def _of_pass(c: Counting, counts: int) -> Any:
    """Return what one of the passes needs."""
    return Counting(
        c.masks, c.replicas, c.group, c.work, c.leader, c.ranks, c.choice, c.computes, counts
    )


@compiled()
def _count_group(engines: Engines, size: int, bits: Any, prompts: Any, c: Counting) -> None:
    """Pass over the tokens of all engines."""
    tokens = np.int64(0)
    for w in range(c.leader, c.leader + size):
        tokens += engines.workers[w].tokens + engines.workers[w].chunk_tokens
    if c.counts == TOTALS:
        c.work.planes[: _n_planes(tokens)] = 0
    for w in range(c.leader, c.leader + size):
        if engines.workers[w].tokens + engines.workers[w].chunk_tokens > 0:
            _count_engine(engines, w, bits, prompts, c)


@compiled()
def _n_planes(tokens: int) -> Any:
    """Return how many bits count so many tokens."""
    n = np.int64(1)
    while 1 << n <= tokens:
        n += 1
    return n


@compiled()
def _clear(work: GroupScratch, ranks: int) -> None:
    work.turn[:] = 0
    work.tokens[:] = 0
    work.active[:ranks] = 0
    work.split[:] = 0
    work.copies[:, :ranks] = 0
    work.pairs[:, :ranks] = 0.0
    work.traffic[:, :ranks] = 0.0


@compiled()
def _find_owners(work: GroupScratch, held: Any, ranks: int) -> None:
    """Note the rank of each expert that one rank computes, ``held`` by rank, if they are many."""
    if ranks < _WIDE:
        return
    for r in range(ranks):
        for at in range(held.shape[1]):
            word = held[r, at]
            while word != 0:
                bit = word & (~word + np.uint64(1))
                word ^= bit
                work.owner[at * 64 + _place(bit)] = r


@compiled(inline="always")
def _place(bit: Any) -> Any:
    """Return the place of a word's only bit."""
    below: Any = popcount(bit - np.uint64(1))  # type: ignore[call-arg]
    return np.int64(below)


@compiled()
def _count_engine(engines: Engines, w: int, bits: Any, prompts: Any, c: Counting) -> None:
    """Count the tokens that an engine computes in its step.

    Its ranks take equal runs of them, the last one perhaps fewer (sequence parallel MoE).
    """
    worker, sequences = engines.workers[w], engines.sequences[w]
    work, tokens = c.work, worker.tokens + worker.chunk_tokens
    per_engine = c.group.ranks_per_engine
    first = np.int64((w - c.leader) * per_engine)
    run = (tokens + per_engine - 1) // per_engine
    n_planes = _n_planes(run)
    if c.counts == BY_HOME:
        work.planes[:n_planes] = 0
    # A token's place matters where instances are chosen, or take turns, token by token.
    alike = c.counts == TOTALS or c.replicas.multi.shape[0] == 0
    position = np.int64(0)
    for i in range(worker.batch):
        row = sequences[i].row
        for _ in range(sequences[i].tokens):
            _begin_token(c, first, position, run, n_planes)
            _count_row(bits, row, np.int64(0), work.active.shape[1], c,
                       first + position // run, position % run, np.int64(1))  # fmt: skip
            position += 1
            row += 1
            if row == sequences[i].row_end:
                row -= sequences[i].row_span
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        if sequences[i].chunk == 0:
            continue
        request = sequences[i].request
        record = engines.requests[request]
        at, stop = sequences[i].computed, sequences[i].computed + sequences[i].chunk
        while at < stop:
            _begin_token(c, first, position, run, n_planes)
            home, place, n = first + position // run, position % run, np.int64(1)
            if at < record.prompt_len:
                if alike:
                    n = min(run - place, min(stop, record.prompt_len) - at)
                n = _count_prompt(prompts, request, record.trace_request, at, n, c, home, place)
                work.tokens[home] += n - 1
            else:  # the window begins with the last prompt token
                row = (record.window_offset + at - record.prompt_len + 1) % record.window_len
                row += record.window_row
                _count_row(bits, row, np.int64(0), work.active.shape[1], c, home, place,
                           np.int64(1))  # fmt: skip
            at, position = at + n, position + n
    if c.counts == BY_HOME:
        _flush(c, first + (position - 1) // run, n_planes)


@compiled()
def _begin_token(c: Counting, first: int, position: int, run: int, n_planes: int) -> None:
    """Note a token at home; where another rank's run begins, settle the one before."""
    if c.counts == BY_HOME and position > 0 and position % run == 0:
        _flush(c, first + position // run - 1, n_planes)
    c.work.tokens[first + position // run] += 1


@compiled()
def _flush(c: Counting, home: int, n_planes: int) -> None:
    """Add the pairs that the bit planes hold, of the tokens of a home rank, and empty them."""
    work, masks, leader = c.work, c.masks, c.leader
    layers = work.pairs.shape[0]
    words = work.active.shape[1] // layers
    for layer in range(layers):
        work.load[: c.ranks] = 0.0
        for k in range(layer * words, (layer + 1) * words):
            weight = 1.0
            for plane in range(n_planes):
                word = work.planes[plane, k]
                if c.ranks >= _WIDE:
                    while word != 0:
                        bit = word & (~word + np.uint64(1))
                        word ^= bit
                        owner = work.owner[k * 64 + _place(bit)]
                        work.active[owner, k] |= bit
                        work.load[owner] += weight
                elif word != 0:
                    for r in range(c.ranks):
                        held = word & masks[leader, r, k]
                        work.active[r, k] |= held
                        work.load[r] += weight * popcount(held)  # type: ignore[call-arg]
                weight *= 2.0
        for r in range(c.ranks):
            if work.load[r] > 0.0:
                work.pairs[layer, r] += work.load[r]
                if c.group.copy_per == EXPERT:
                    add_direct(work.traffic[layer], home, r, work.load[r], c.group.gpus_per_node)
    work.planes[:n_planes] = 0


@compiled()
def settle_totals(c: Counting) -> None:
    """Choose instances from the tokens of each expert; pairs and activated experts follow."""
    work, several = c.work, c.replicas.multi.shape[0] > 0
    layers = work.pairs.shape[0]
    words = work.active.shape[1] // layers
    n_planes = _n_planes(work.tokens[: c.ranks].sum())
    for layer in range(layers):
        _count_singles(c, layer, words, n_planes)
        n_several = _list_several(c, layer, words, n_planes) if several else np.int64(0)
        for r in range(c.ranks):
            work.pairs[layer, r] = work.load[r]
            for k in range(words):
                at = layer * words + k
                work.active[r, at] = work.union[k] & c.masks[c.leader, r, at]
        if n_several > 0:
            choose_instances(c, layer, n_several)
            _add_several(c, layer, words, n_several)


@compiled()
def _count_singles(c: Counting, layer: int, words: int, n_planes: int) -> None:
    """Count a layer's union, and each rank's activated experts and pairs of single instances."""
    work = c.work
    work.n_active[: c.ranks] = 0
    work.load[: c.ranks] = 0.0
    for k in range(words):
        at, union, weight = layer * words + k, np.uint64(0), 1.0
        for plane in range(n_planes):
            word = work.planes[plane, at]
            if word != 0:
                union |= word
                for r in range(c.ranks):
                    held = word & c.masks[c.leader, r, at]
                    work.load[r] += weight * popcount(held)  # type: ignore[call-arg]
            weight *= 2.0
        work.union[k] = union
        for r in range(c.ranks):
            n: Any = popcount(union & c.masks[c.leader, r, at])  # type: ignore[call-arg]
            work.n_active[r] += np.int64(n)


@compiled()
def _list_several(c: Counting, layer: int, words: int, n_planes: int) -> Any:
    """List the activated experts of several instances and their tokens; return how many."""
    work, n = c.work, np.int64(0)
    for k in range(words):
        at = layer * words + k
        many = work.union[k] & c.replicas.multi[c.leader, at]
        while many != 0:
            bit = many & (~many + np.uint64(1))
            many ^= bit
            expert, tokens = k * 64 + _place(bit), np.int64(0)
            for plane in range(n_planes):
                if work.planes[plane, at] & bit:
                    tokens += np.int64(1) << plane
            work.total[expert] = tokens
            work.several[n] = expert
            n += 1
    return n


@compiled()
def _add_several(c: Counting, layer: int, words: int, n_several: int) -> None:
    """Add the pairs and activated instances of the experts of several instances."""
    work = c.work
    for i in range(n_several):
        expert = work.several[i]
        n, tokens = work.n_chosen[layer, expert], work.total[expert]
        at, bit = layer * words + expert // 64, np.uint64(1) << np.uint64(expert % 64)
        if n > 1:
            work.split[at] |= bit
        for j in range(min(n, tokens)):
            rank = work.chosen[layer, expert, j]
            work.pairs[layer, rank] += (tokens - j + n - 1) // n
            _activate(work, layer, rank, at, bit)


@compiled(inline="always")
def _activate(work: GroupScratch, layer: int, rank: int, at: int, bit: Any) -> None:
    """Note that a rank reads one more instance: each has weights of its own, on one GPU too."""
    if work.active[rank, at] & bit:
        work.copies[layer, rank] += 1
    work.active[rank, at] |= bit


@compiled()
def _count_prompt(
    prompts: Any, request: int, own: int, token: int, n: int, c: Counting, home: int, place: int
) -> Any:
    """Count up to ``n`` prompt tokens of one home rank; return how many of them.

    It ends where another trace request's rows begin. A prompt longer than its recording repeats the
    rows, each of which is counted once, for all its tokens. Layers beyond those of the trace are as
    `expert_union` has them.
    """
    source = np.int64(own)
    if prompts.prefix_block_tokens > 0:
        source, end = _source(prompts, request, own, token), token + 1
        while end < token + n and _source(prompts, request, own, end) == source:
            end = (end // prompts.prefix_block_tokens + 1) * prompts.prefix_block_tokens
        n = min(n, end - token)
    have, need = prompts.bits.shape[1], c.work.active.shape[1]
    span, base = np.int64(prompts.length[source]), prompts.first_row[source]
    tiles = (need + have - 1) // have
    cycles, rest = n // span, n % span
    for i in range(rest if cycles == 0 else span):
        tokens = cycles + (1 if i < rest else 0)
        for tile in range(tiles):
            row = base + (token + i + tile * span // tiles) % span
            width = min(have, need - tile * have)
            _count_row(prompts.bits, row, np.int64(tile * have), width, c, home, place, tokens)
    return n


@compiled()
def _source(prompts: Any, request: int, own: int, token: int) -> Any:
    """Return the trace request whose rows a prompt token replays."""
    first, end = prompts.prefix_indptr[request], prompts.prefix_indptr[request + 1]
    block = token // prompts.prefix_block_tokens
    return np.int64(prompts.prefix_trace_request[first + block] if block < end - first else own)


@compiled()
def _count_row(
    bits: Any, row: int, first: int, width: int, c: Counting, home: int, place: int, tokens: int
) -> None:
    """Count the experts of tokens that are alike on the layers from bit-set word ``first`` on.

    ``home`` is the tokens' rank, ``place`` the position of the first one there.
    """
    work, replicas, leader = c.work, c.replicas, c.leader
    per = c.group.copy_per
    by_rank = per in (RANK, NODE)
    layers = work.pairs.shape[0]
    words = work.active.shape[1] // layers
    hashed = (place * HASH_MULTIPLIER) & 0xFFFFFFFF
    if c.counts == COPIES:
        _send_row(bits, row, first, width, c, home, tokens)
        return
    if c.counts == TOTALS or (not by_rank and replicas.multi.shape[0] == 0):
        plane = 0
        while tokens >> plane:
            if (tokens >> plane) & 1:
                for k in range(width):
                    _add_word(work.planes, plane, first + k, bits[row, k])
            plane += 1
        return
    for layer in range(first // words, (first + width) // words):
        n_reached = np.int64(0)
        for k in range(layer * words, (layer + 1) * words):
            word, many = bits[row, k - first], np.uint64(0)
            if replicas.multi.shape[0] > 0:
                many = word & replicas.multi[leader, k]
                word &= ~many
            if by_rank:
                held = c.masks[leader]
                n_reached = _reach_all(work, n_reached, word, held, k, c.ranks)
            _add_word(work.planes, 0, k, word)
            while many != 0:
                bit = many & (~many + np.uint64(1))
                many ^= bit
                expert = (k - layer * words) * 64 + _place(bit)
                at = layer % replicas.n_instances.shape[1]
                n = np.int64(replicas.n_instances[leader, at, expert])
                if c.choice == ASKED:
                    j = asked_instance(replicas.asked, home, place, k, bit)
                else:
                    j = choose_instance(
                        c.choice, replicas.rank[leader, at, expert],
                        replicas.weight[leader, at, expert], n, c.group.gpus_per_node, home, hashed,
                        (place << 40) | (home << 28) | (at << 16) | expert,
                    )  # fmt: skip
                r = np.int64(replicas.rank[leader, at, expert, j])
                if not work.used[layer, expert, j]:
                    work.used[layer, expert, j] = True
                    _activate(work, layer, r, k, bit)
                work.pairs[layer, r] += 1.0
                if per == EXPERT:
                    add_direct(work.traffic[layer], home, r, 1.0, c.group.gpus_per_node)
                n_reached = _reach(work.reached, n_reached, r)
        if by_rank:
            _send_once(c, layer, home, tokens, n_reached)


@compiled(inline="always")
def _reach(reached: Any, n: int, rank: int) -> Any:
    """Add a rank to the ``n`` that a token reaches, unless it is among them; return how many."""
    for i in range(n):
        if reached[i] == rank:
            return n
    reached[n] = rank
    return n + 1


@compiled()
def _reach_all(work: GroupScratch, n: int, word: Any, held: Any, at: int, ranks: int) -> Any:
    """Add the ranks that hold experts of a token's word, ``held[:, at]``; return how many."""
    if ranks < _WIDE:
        for r in range(ranks):
            if word & held[r, at]:
                n = _reach(work.reached, n, r)
        return n
    while word != 0:
        bit = word & (~word + np.uint64(1))
        word ^= bit
        n = _reach(work.reached, n, np.int64(work.owner[at * 64 + _place(bit)]))
    return n


@compiled()
def _send_once(c: Counting, layer: int, home: int, tokens: int, n_reached: int) -> None:
    """Count copies of tokens for each rank, and each node, that they reach."""
    traffic, gpus, reached = c.work.traffic[layer], c.group.gpus_per_node, c.work.reached
    own, place, n_nodes = home // gpus, home % gpus, np.int64(0)
    for i in range(n_reached):
        if c.group.copy_per == RANK:
            add_direct(traffic, home, reached[i], tokens, gpus)
            continue
        node = reached[i] // gpus
        there = node * gpus + place
        add_forwarded(traffic, there, reached[i], tokens)
        before = n_nodes
        n_nodes = _reach(c.work.reached_nodes, n_nodes, node)
        if n_nodes > before and node != own:
            add_to_node(traffic, home, there, tokens)


@compiled()
def _send_row(
    bits: Any, row: int, first: int, width: int, c: Counting, home: int, tokens: int
) -> None:
    """Count the copies of tokens to the ranks that compute them, which are settled."""
    work, by_expert, several = c.work, c.group.copy_per == EXPERT, c.replicas.multi.shape[0] > 0
    nodes = c.group.gpus_per_node
    words = work.active.shape[1] // work.pairs.shape[0]
    for layer in range(first // words, (first + width) // words):
        n_reached = np.int64(0)
        for k in range(layer * words, (layer + 1) * words):
            word, many = bits[row, k - first], np.uint64(0)
            if several:
                many = word & work.split[k]
                word &= ~many
            if not by_expert:
                n_reached = _reach_all(work, n_reached, word, work.active, k, c.ranks)
            elif c.ranks >= _WIDE:
                while word != 0:
                    bit = word & (~word + np.uint64(1))
                    word ^= bit
                    owner = np.int64(work.owner[k * 64 + _place(bit)])
                    add_direct(work.traffic[layer], home, owner, tokens, nodes)
            else:
                for r in range(c.ranks):
                    copies: Any = popcount(word & work.active[r, k])  # type: ignore[call-arg]
                    add_direct(work.traffic[layer], home, r, tokens * copies, nodes)
            while many != 0:
                bit = many & (~many + np.uint64(1))
                many ^= bit
                expert = (k - layer * words) * 64 + _place(bit)
                turn = work.turn[layer, expert]
                work.turn[layer, expert] = turn + 1
                chosen = work.chosen[layer, expert, turn % work.n_chosen[layer, expert]]
                n_reached = _reach(work.reached, n_reached, chosen)
                if by_expert:
                    add_direct(work.traffic[layer], home, chosen, 1.0, nodes)
        if not by_expert:
            _send_once(c, layer, home, tokens, n_reached)


@compiled(inline="always")
def _add_word(planes: Any, plane: int, k: int, word: Any) -> None:
    """Count the bits of a word in bit planes from one on: carry-save addition."""
    while word != 0:
        both = planes[plane, k] & word
        planes[plane, k] ^= word
        word = both
        plane += 1
