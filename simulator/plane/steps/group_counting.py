"""Where the tokens of a group's step go: pairs, activated experts and copies, rank by rank.

Tokens are counted in bit planes (`bit_planes`), by expert; what a rank computes, sends or receives
are population counts of the experts that only it holds. Where a copy goes to each expert, home
ranks are counted one by one: a rank sends what its tokens choose less what it holds, and receives
what all choose of it less its own, near, of its node, and far. Where a copy goes to each rank or
node, and where experts have several instances, each token counts (`token_blocks`). An instance is
known from the token alone (hash, source, weights), or from the tokens of each expert in the whole
step, which are then counted first, and taken in turn."""

from typing import Any

import numpy as np

from eldr_sim.jit import lowest, popcount
from eldr_sim.kernel_profiles.kernels import all_to_all_cost
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.steps import bit_planes
from eldr_sim.simulator.plane.steps.expert_loads import ExpertLoads, add_counts
from eldr_sim.simulator.plane.steps.group_state import (
    ALL,
    EVEN,
    EXPERT,
    METRO,
    NODE,
    OPTIMAL,
    RANK,
    Counting,
)
from eldr_sim.simulator.plane.steps.replica_choice import choose_instances
from eldr_sim.simulator.plane.steps.token_blocks import (
    Pass,
    begin_blocks,
    end_block,
    list_experts,
    take_row,
)
from eldr_sim.simulator.plane.steps.verify import Drafts, draft_row

_NONE, _EVERY = np.uint64(0), ~np.uint64(0)


@compiled()
def count_step(
    engines: Engines, drafts: Drafts, size: int, bits: Any, prompts: Any, c: Counting,
    loads: ExpertLoads,
) -> None:  # fmt: skip
    """Count what the engines of a group (``size``) compute in their step, into ``c.work``, and for
    a relocation into ``loads``; others as of `group_step.group_step`."""
    work, per = c.work, c.group.copy_per
    tokens = np.int64(0)
    for w in range(c.leader, c.leader + size):
        tokens += engines.workers[w].tokens + engines.workers[w].chunk_tokens
    n_planes, relocates = bit_planes.n_planes_for(tokens), loads.part[c.leader] >= 0
    work.traffic[:, : c.ranks] = 0.0
    to_each, several = per == EXPERT, c.replicas.multi.shape[0] > 0
    hold_single(c)
    twice = several and (c.choice > EVEN or (c.choice == EVEN and per == ALL))
    if twice:  # and for the first time to know how many there are
        only = Pass(n_planes, True, False, False)
        _count_group(engines, drafts, size, bits, prompts, c, only)
        if relocates:
            add_counts(loads, c.leader, work.planes, n_planes, work.carry)
        settle_totals(c)
        if per == ALL:
            return
    blocks = per in (RANK, NODE) or (several and not (twice and METRO <= c.choice <= OPTIMAL))
    this = Pass(n_planes, to_each or not twice, to_each, blocks)
    _count_group(engines, drafts, size, bits, prompts, c, this)
    if not twice:
        total = work.node_planes[_add_nodes(c, n_planes)] if to_each else work.planes
        _settle(c, total, n_planes)
        if several:
            _add_taken(c)
        if relocates:
            add_counts(loads, c.leader, total, n_planes, work.carry)
    if to_each:
        _settle_received(c, this)


@compiled()
def count_rows(bits: Any, rows: Any, c: Counting) -> None:
    """Count a step of tokens, ``rows`` of ``bits``, that all go to every rank, on the ranks in
    turn, into ``c.work``."""
    work, n = c.work, rows.shape[0]
    for r in range(c.ranks):
        work.tokens[r] = (n - r + c.ranks - 1) // c.ranks
    n_planes = bit_planes.n_planes_for(n)
    work.planes[:n_planes] = _NONE
    bit_planes.add_rows(bits, rows, n, work.planes, 0, 0, n_planes, work.carry, work.empty)
    hold_single(c)
    settle_totals(c)


@compiled()
def hold_single(c: Counting) -> None:
    """Let ranks hold the experts of one instance."""
    for r in range(c.ranks):
        held, mask = c.work.held[r], c.masks[c.leader, r]
        for k in range(held.shape[0]):
            held[k] = mask[k]


# --- tokens ---


@compiled()
def _count_group(
    engines: Engines, drafts: Drafts, size: int, bits: Any, prompts: Any, c: Counting, this: Pass
) -> None:
    """Pass over the tokens of all engines."""
    work = c.work
    work.tokens[:] = 0
    work.own[: c.ranks] = 0.0
    if this.counts:
        work.planes[: this.n_planes] = _NONE
    if this.by_home:
        work.node_planes[:, : this.n_planes] = _NONE
    if this.blocks:
        begin_blocks(c)
    for w in range(c.leader, c.leader + size):
        if engines.workers[w].tokens + engines.workers[w].chunk_tokens > 0:
            _count_engine(engines, drafts, w, bits, prompts, c, this)
    if this.blocks:
        end_block(c)


@compiled()
def _count_engine(
    engines: Engines, drafts: Drafts, w: int, bits: Any, prompts: Any, c: Counting, of_step: Pass
) -> None:
    """Count an engine's tokens, in equal runs on its ranks (sequence parallel MoE)."""
    worker, sequences, work = engines.workers[w], engines.sequences[w], c.work
    home = np.int64((w - c.leader) * c.group.ranks_per_engine)
    run = worker.tokens + worker.chunk_tokens + c.group.ranks_per_engine - 1
    run //= c.group.ranks_per_engine
    n_planes = bit_planes.n_planes_for(run) if of_step.by_home else of_step.n_planes
    this = Pass(n_planes, of_step.counts, of_step.by_home, of_step.blocks)
    left, n, place, period = run, np.int64(0), np.int64(0), engines.settings[0].period
    for i in range(worker.batch):
        row = sequences[i].row
        for j in range(sequences[i].tokens):
            work.rows[n] = row
            if period > 0:
                work.rows[n] = place % period
            elif j > 0 and not drafts.in_a_row:
                record = engines.requests[sequences[i].request]
                work.rows[n] = draft_row(drafts, record, sequences[i], j, bits.shape[0])
            n, place = n + 1, place + 1
            row += 1
            if row == sequences[i].row_end:
                row -= sequences[i].row_span
            if n in (left, work.rows.shape[0]):
                _count_rows(bits, n, c, this, home, run - left)
                left, n = left - n, np.int64(0)
                if left == 0:
                    _end_home(c, this, home, run)
                    home, left = home + 1, run
    if n > 0:
        _count_rows(bits, n, c, this, home, run - left)
        left -= n
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        if sequences[i].chunk == 0:
            continue
        request = sequences[i].request
        record = engines.requests[request]
        at, stop = sequences[i].computed, sequences[i].computed + sequences[i].chunk
        while at < stop:
            if at < record.prompt_len:
                n = _count_prompt(
                    prompts, request, record.trace_request, at,
                    min(left, min(stop, record.prompt_len) - at), c, this, home, run - left,
                )  # fmt: skip
            else:  # the window begins with the last prompt token
                n = min(min(left, stop - at), work.rows.shape[0])
                row = record.window_offset + at - record.prompt_len + 1
                for j in range(n):
                    work.rows[j] = record.window_row + (row + j) % record.window_len
                _count_rows(bits, n, c, this, home, run - left)
            at, left = at + n, left - n
            if left == 0:
                _end_home(c, this, home, run)
                home, left = home + 1, run
    if left < run:
        _end_home(c, this, home, run - left)


@compiled()
def _count_rows(bits: Any, n: int, c: Counting, this: Pass, home: int, place: int) -> None:
    """Count the tokens of ``work.rows[:n]``, from a place of a home rank on."""
    work = c.work
    if this.counts:
        bit_planes.add_rows(
            bits, work.rows, n, work.planes, 0, 0, this.n_planes, work.carry, work.empty
        )
    for i in range(n if this.blocks else 0):
        take_row(bits[work.rows[i]], c, home, place + i, np.int64(1))


@compiled()
def _count_prompt(
    prompts: Any, request: int, own: int, token: int, n: int, c: Counting, this: Pass, home: int,
    place: int,
) -> Any:  # fmt: skip
    """Count up to ``n`` prompt tokens of one home rank; return how many, up to another request's
    rows. Those of a prompt longer than its recording repeat; layers beyond the trace's are as in
    `expert_union`."""
    source = np.int64(own)
    if prompts.prefix_block_tokens > 0:
        source, end = _source(prompts, request, own, token), token + 1
        while end < token + n and _source(prompts, request, own, end) == source:
            end = (end // prompts.prefix_block_tokens + 1) * prompts.prefix_block_tokens
        n = min(n, end - token)
    span: Any = np.int64(prompts.length[source])
    if c.replicas.multi.shape[0] > 0:  # each has a place of its own
        n = min(n, span)
    cycles, rest = n // span, n % span
    if cycles > 0:
        _count_span(prompts, source, token + rest, span - rest, c, this, home, place, cycles)
    if rest > 0:
        _count_span(prompts, source, token, rest, c, this, home, place, cycles + 1)
    return n


@compiled()
def _source(prompts: Any, request: int, own: int, token: int) -> Any:
    """Return the trace request whose rows a prompt token replays."""
    first, end = prompts.prefix_indptr[request], prompts.prefix_indptr[request + 1]
    block = token // prompts.prefix_block_tokens
    return np.int64(prompts.prefix_trace_request[first + block] if block < end - first else own)


@compiled()
def _count_span(
    prompts: Any, source: int, token: int, n: int, c: Counting, this: Pass, home: int, place: int,
    weight: int,
) -> None:  # fmt: skip
    """Count ``n`` rows of a recorded prompt from a token on, each for ``weight`` tokens."""
    work, have = c.work, prompts.bits.shape[1]
    span, base = np.int64(prompts.length[source]), prompts.first_row[source]
    tiles = (work.carry.shape[0] + have - 1) // have
    for start in range(0, n, bit_planes.EIGHT):
        m = min(n - start, bit_planes.EIGHT)
        for tile in range(tiles):
            width = min(have, work.carry.shape[0] - tile * have)
            row = (token + start + tile * span // tiles) % span
            for i in range(bit_planes.EIGHT):
                into = work.staged[i, tile * have : tile * have + width]
                if i < m:
                    taken = prompts.bits[base + row]
                    for k in range(width):
                        into[k] = taken[k]
                    row = row + 1 if row + 1 < span else np.int64(0)
                else:
                    for k in range(width):
                        into[k] = _NONE
        plane = np.int64(0)
        while this.counts and weight >> plane:
            if (weight >> plane) & 1:
                bit_planes.add_block(work.staged, work.planes, 0, work.carry.shape[0], plane,
                          this.n_planes, work.carry)  # fmt: skip
            plane += 1
        for i in range(m if this.blocks else 0):
            take_row(work.staged[i], c, home, place + start + i, weight)


# --- sums ---


@compiled()
def _end_home(c: Counting, this: Pass, home: int, tokens: int) -> None:
    """Settle the traffic of a home rank, all whose tokens have been counted."""
    work = c.work
    work.tokens[home] = tokens
    if not this.by_home:
        return
    gpus, n_planes = c.group.gpus_per_node, this.n_planes
    node, width = home // gpus, work.carry.shape[0]
    work.counts[:] = _NONE
    planes, near = work.planes, work.mask
    bit_planes.add_counts_of(planes, n_planes, work.held[home], work.counts[0])
    near[:] = _EVERY
    bit_planes.add_counts_of(planes, n_planes, near, work.counts[2])
    if c.ranks > gpus:
        near[:] = _NONE
        for r in range(node * gpus, min((node + 1) * gpus, c.ranks)):
            mine = work.held[r]
            for k in range(width):
                near[k] |= mine[k]
        bit_planes.add_counts_of(planes, n_planes, near, work.counts[1])
    bit_planes.add_planes(work.node_planes[node], planes, n_planes, work.carry)
    planes[:n_planes] = _NONE
    for i in range(3):
        bit_planes.by_layer(work.counts[i], work.sums[i])
    inside = work.sums[1 if c.ranks > gpus else 2]
    _add_sent(
        work.sums[0], inside, work.sums[2], work.own[home],
        work.traffic[all_to_all_cost.SENT, home], work.traffic[all_to_all_cost.SENT_FAR, home],
    )  # fmt: skip


@compiled(restrict=True)
def _add_sent(own: Any, inside: Any, every: Any, kept: Any, sent: Any, far: Any) -> None:
    for layer in range(own.shape[0]):
        kept[layer] += own[layer]
        sent[layer] += inside[layer] - own[layer]
        far[layer] += every[layer] - inside[layer]


@compiled()
def _add_nodes(c: Counting, n_planes: int) -> Any:
    """Add the planes of all nodes up; return where the sum is."""
    work, n_nodes = c.work, (c.ranks + c.group.gpus_per_node - 1) // c.group.gpus_per_node
    if n_nodes == 1:
        return np.int64(0)
    for node in range(n_nodes):
        bit_planes.add_planes(
            work.node_planes[n_nodes], work.node_planes[node], n_planes, work.carry
        )
    return np.int64(n_nodes)


@compiled()
def _settle(c: Counting, total: Any, n_planes: int) -> None:
    """Count each rank's pairs and activated experts, from the tokens of each expert."""
    work = c.work
    bit_planes.union_of(total, n_planes, work.union)
    for r in range(c.ranks):
        held = work.held[r]
        work.counts[:2] = _NONE
        bit_planes.add_counts_of(total, n_planes, held, work.counts[0])
        _count_active(work.union, held, work.counts[1])
        bit_planes.by_layer(work.counts[0], work.pairs[r])
        bit_planes.by_layer(work.counts[1], work.instances[r])


@compiled(restrict=True)
def _count_active(union: Any, held: Any, counts: Any) -> None:
    for k in range(counts.shape[0]):
        counts[k] = popcount(union[k] & held[k])


@compiled()
def _settle_received(c: Counting, this: Pass) -> None:
    """Count what each rank receives where a copy goes to each expert."""
    work, gpus = c.work, c.group.gpus_per_node
    several = this.blocks  # where copies go to each expert, only these need them
    for r in range(c.ranks):
        near = work.pairs[r]
        if several:
            _take_off(work.copied, r, work.own[r], work.traffic[all_to_all_cost.SENT, r])
        if c.ranks > gpus:
            near = work.sums[0]
            work.counts[0] = _NONE
            bit_planes.add_counts_of(
                work.node_planes[r // gpus], this.n_planes, work.held[r], work.counts[0]
            )
            bit_planes.by_layer(work.counts[0], near)
            for layer in range(near.shape[0] if several else 0):
                near[layer] += work.near[r, layer]
        _add_received(
            near, work.own[r], work.pairs[r], work.traffic[all_to_all_cost.RECEIVED, r],
            work.traffic[all_to_all_cost.RECEIVED_FAR, r],
        )  # fmt: skip


@compiled()
def _take_off(copied: Any, rank: int, own: Any, sent: Any) -> None:
    for layer in range(own.shape[0]):
        own[layer] += copied[layer, rank]
        sent[layer] -= copied[layer, rank]


@compiled()
def _add_received(near: Any, own: Any, every: Any, received: Any, far: Any) -> None:
    for layer in range(near.shape[0]):
        received[layer] = near[layer] - own[layer]
        far[layer] = every[layer] - near[layer]


@compiled()
def _add_taken(c: Counting) -> None:
    """Add the pairs and activated instances of experts of several instances, each of whose tokens
    has been counted."""
    work, replicas = c.work, c.replicas
    for layer in range(work.pairs.shape[1]):
        at, end = layer % replicas.n_instances.shape[1], work.n_listed[c.leader, layer]
        _add_layer(
            work.listed[c.leader, layer, end[c.ranks - 1] : end[c.ranks + 1]],
            replicas.n_instances[c.leader, at], replicas.rank[c.leader, at], c.choice >= EVEN,
            work.taken, layer, work.summed, work.pairs[: c.ranks], work.instances,
        )  # fmt: skip


@compiled(restrict=True)
def _add_layer(
    numbers: Any, n_of: Any, ranks_of: Any, in_turn: bool, taken: Any, layer: int, summed: Any,
    pairs: Any, instances: Any,
) -> None:  # fmt: skip
    """Sum up a layer: tokens, and in the upper bits how many instances have any; each has weights
    of its own, on one GPU too."""
    for rank in range(pairs.shape[0]):
        summed[rank] = 0
    for i in range(numbers.shape[0]):
        expert = np.uint64(numbers[i])
        n, tokens = np.int64(n_of[expert]), taken[0, layer, i]
        each, more = tokens >> 1, tokens & 1
        if in_turn and n > 2:
            each, more = tokens // n, tokens % n
        for j in range(n):
            mine = taken[j, layer, i]
            if in_turn:
                mine = each + 1 if j < more else each
            summed[np.uint64(ranks_of[expert, j])] += mine + (min(mine, 1) << 40)
    for rank in range(pairs.shape[0]):
        pairs[rank, layer] += summed[rank] & ((1 << 40) - 1)
        instances[rank, layer] += summed[rank] >> 40


# --- choices by count ---


@compiled()
def settle_totals(c: Counting) -> None:
    """Choose instances from the tokens of each expert; pairs and activated experts follow. Ranks
    hold experts of one instance; the planes count ``work.tokens``."""
    work, several = c.work, c.replicas.multi.shape[0] > 0
    layers = work.pairs.shape[1]
    words = work.carry.shape[0] // layers
    n_planes = bit_planes.n_planes_for(work.tokens[: c.ranks].sum())
    _settle(c, work.planes, n_planes)
    if not several:
        return
    list_experts(c)
    one_each = METRO <= c.choice <= OPTIMAL
    for layer in range(layers):
        for r in range(c.ranks):
            work.load[r] = work.pairs[r, layer]
            work.n_active[r] = np.int64(work.instances[r, layer])
        n_several = _list_several(c, layer, words, np.int64(0) if one_each else n_planes)
        if n_several > 0:
            choose_instances(c, layer, n_several)
            if one_each:
                _hold_given(c, layer, words, n_several)
            else:
                _add_several(c, layer, n_several)
    if one_each:
        _settle(c, work.planes, n_planes)


@compiled(inline="always")  # handing `Counting` over takes long
def _list_several(c: Counting, layer: int, words: int, n_planes: int) -> Any:
    """List the activated experts of several instances and their tokens; return how many."""
    work, n = c.work, np.int64(0)
    for k in range(words):
        at = layer * words + k
        many = work.union[at] & c.replicas.multi[c.leader, at]
        while many != 0:
            place = np.uint64(lowest(many))
            many &= many - np.uint64(1)
            tokens = np.uint64(0)
            for plane in range(n_planes):
                tokens |= ((work.planes[plane, at] >> place) & np.uint64(1)) << np.uint64(plane)
            expert = k * 64 + np.int64(place)
            work.total[expert] = np.int64(tokens)
            work.several[n] = expert
            n += 1
    return n


@compiled(inline="always")
def _hold_given(c: Counting, layer: int, words: int, n_several: int) -> None:
    """Let ranks hold the experts of several instances that only they compute."""
    work = c.work
    for i in range(n_several):
        expert = work.several[i]
        rank = work.given[expert]
        work.chosen[0, layer, expert], work.n_chosen[layer, expert] = rank, 1
        work.held[rank, layer * words + expert // 64] |= np.uint64(1) << np.uint64(expert % 64)


@compiled(inline="always")
def _add_several(c: Counting, layer: int, n_several: int) -> None:
    """Add the pairs and activated instances of the experts of several instances."""
    work = c.work
    for i in range(n_several):
        expert = work.several[i]
        n, tokens = work.n_chosen[layer, expert], work.total[expert]
        for j in range(min(n, tokens)):
            rank = work.chosen[j, layer, expert]
            work.pairs[rank, layer] += (tokens - j + n - 1) // n
            work.instances[rank, layer] += 1  # each has weights of its own, on one GPU too
