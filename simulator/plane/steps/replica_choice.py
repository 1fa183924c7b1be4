"""Choices of instances, compiled: by the tokens of an expert, which ranks compute them in turn; by
the token, which instance computes it. Tests hold them equal to the numpy classes of
`policies.replicas`."""

from typing import Any

import numpy as np

from eldr_sim.jit import popcount
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s
from eldr_sim.policies.replicas.metro import WALK_MULTIPLIER
from eldr_sim.policies.replicas.weighted import SPLITMIX
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.steps import group_state

_MIX, _HALF = np.uint64(WALK_MULTIPLIER), np.uint64(32)
_ONE = np.uint64(1)
_ADD, _FIRST, _SECOND = (np.uint64(constant) for constant in SPLITMIX)


@compiled(inline="always")
def choose_instances(c: group_state.Counting, layer: int, n_several: int) -> None:
    """Choose the ranks that compute a layer's ``n_several`` experts of several instances, into
    ``work.chosen``, or where each has one into ``work.given``. ``c``: activated experts in
    ``union``, those with ``several`` and, where many may compute one, their ``total`` tokens;
    ``n_active``, ``load``: of each rank, experts and pairs of those of one instance."""
    work, at = c.work, layer % c.replicas.n_instances.shape[1]
    if c.choice == group_state.EVEN:
        for i in range(n_several):
            expert = work.several[i]
            n = np.int64(c.replicas.n_instances[c.leader, at, expert])
            work.n_chosen[layer, expert] = n
            for j in range(n):
                work.chosen[j, layer, expert] = c.replicas.rank[c.leader, at, expert, j]
    elif c.choice == group_state.METRO:
        _metro(c, layer, at)
    elif c.choice == group_state.METRO_SORTED:
        _sorted(c, layer, at, n_several)
    elif c.choice == group_state.OPTIMAL:
        _sorted(c, layer, at, n_several)
        _balance(c, layer, at, n_several)
    else:
        _by_time(c, layer, at, n_several)


@compiled(inline="always")
def _union_of(union: Any, layers: int, layer: int) -> Any:
    """Return the words of a layer."""
    words = union.shape[0] // layers
    return union[layer * words : (layer + 1) * words]


@compiled(inline="always")
def _give(ranks: Any, n: int, n_active: Any, more: Any) -> Any:
    """Return the rank of ``ranks[:n]`` with the fewest activated experts, which gets ``more``.
    Where it is one, ``ranks`` says it twice: most have one or two, which takes no jump."""
    best, second = np.uint64(ranks[0]), np.uint64(ranks[1])
    least, other = n_active[best], n_active[second]
    best, least = (second, other) if other < least else (best, least)
    for j in range(2, n):
        rank = np.uint64(ranks[j])
        best, least = (rank, n_active[rank]) if n_active[rank] < least else (best, least)
    n_active[best] = least + more
    return best


@compiled(inline="always")
def _metro(c: group_state.Counting, layer: int, at: int) -> None:
    """Let the rank with the fewest experts compute one, in a walk by the activated ones."""
    work, n = c.work, np.int64(c.replicas.n_instances.shape[2])
    union = _union_of(work.union, work.pairs.shape[1], layer)
    mixed = np.uint64(at + 1)
    for k in range(union.shape[0]):
        mixed = (mixed ^ union[k]) * _MIX
        mixed ^= mixed >> _HALF
    stride = work.strides[np.int64((mixed >> _HALF) % np.uint64(n - 1 if n > 1 else 1))]
    work.n_active[: c.ranks] = 0
    _walk(
        union, c.replicas.rank[c.leader, at], c.replicas.n_instances[c.leader, at],
        mixed % np.uint64(n), np.uint64(stride), work.n_active[: c.ranks], work.given,
    )  # fmt: skip


@compiled(restrict=True)
def _walk(
    union: Any, ranks_of: Any, n_of: Any, expert: Any, stride: Any, n_active: Any, given: Any
) -> None:
    """Give all experts to ranks, from one on, each ``stride`` after the last."""
    n, packed, counts = np.uint64(n_of.shape[0]), n_active.shape[0] <= 8, np.uint64(0)
    packed = packed and n < 256  # counts are bytes of one word then, which memory need not pass on
    for _ in range(n_of.shape[0]):
        active = (union[expert >> np.uint64(6)] >> (expert & np.uint64(63))) & _ONE
        if packed:
            given[expert] = _pick(ranks_of[expert], n_of[expert], counts)
            counts += active << np.uint64(given[expert] << 3)
        else:
            given[expert] = _give(ranks_of[expert], n_of[expert], n_active, np.int64(active))
        expert += stride
        if expert >= n:  # a division takes ten times as long
            expert -= n


@compiled(inline="always")
def _pick(ranks: Any, n: int, counts: Any) -> Any:
    """Return what `_give` does, by ``counts`` of a byte each."""
    best, second = np.uint64(ranks[0]), np.uint64(ranks[1])
    least, other = _byte(counts, best), _byte(counts, second)
    best, least = (second, other) if other < least else (best, least)
    for j in range(2, n):
        rank = np.uint64(ranks[j])
        other = _byte(counts, rank)
        best, least = (rank, other) if other < least else (best, least)
    return np.int64(best)


@compiled(inline="always")
def _byte(counts: Any, place: Any) -> Any:
    return (counts >> (place << np.uint64(3))) & np.uint64(255)


@compiled(inline="always")
def _sorted(c: group_state.Counting, layer: int, at: int, n_several: int) -> None:
    """Take experts of several instances after those of one, as `_metro` does."""
    ranks, n_of = c.replicas.rank[c.leader, at], c.replicas.n_instances[c.leader, at]
    for i in range(n_several):
        expert = c.work.several[i]
        c.work.given[expert] = _give(ranks[expert], n_of[expert], c.work.n_active, np.int64(1))


@compiled()
def _balance(c: group_state.Counting, layer: int, at: int, n_several: int) -> None:
    """Move experts along paths of ranks until none leaves a fullest rank."""
    work, active = c.work, np.int64(0)
    union = _union_of(work.union, work.pairs.shape[1], layer)
    for k in range(union.shape[0]):
        active += np.int64(popcount(union[k]))
    least = (active + c.ranks - 1) // c.ranks
    while True:
        top = np.int64(0)
        for rank in range(c.ranks):
            if work.n_active[rank] > work.n_active[top]:
                top = np.int64(rank)
        if work.n_active[top] <= least:
            return
        end = _path(c, layer, at, n_several, top)
        if end < 0:
            return
        work.n_active[top] -= 1
        work.n_active[end] += 1
        while end != top:
            work.given[work.moved[end]] = end
            end = work.before[end]


@compiled()
def _path(c: group_state.Counting, layer: int, at: int, n_several: int, top: int) -> Any:
    """Return the end of the shortest path from ``top`` to a rank with two experts fewer, or -1."""
    work = c.work
    work.before[: c.ranks] = -1
    work.before[top], work.queue[0] = top, top
    head, tail = 0, 1
    while head < tail:
        rank = work.queue[head]
        head += 1
        for i in range(n_several):
            expert = work.several[i]
            if work.given[expert] != rank:
                continue
            for j in range(c.replicas.n_instances[c.leader, at, expert]):
                other = np.int64(c.replicas.rank[c.leader, at, expert, j])
                if work.before[other] >= 0:
                    continue
                work.before[other], work.moved[other], work.queue[tail] = rank, expert, other
                tail += 1
                if work.n_active[other] <= work.n_active[top] - 2:
                    return other
    return np.int64(-1)


@compiled()
def _seconds(c: group_state.Counting, rank: int, more: int) -> float:
    """Return the time of a rank with ``more`` pairs on another expert, s."""
    work, experts = c.work, 1 if more > 0 else 0
    if work.load[rank] + more == 0:
        return 0.0
    pairs, count = work.load[rank] + more, float(work.n_active[rank] + experts)
    return float(rank_moe_s(c.group.moe, pairs, count, c.computes))


@compiled()
def _by_time(c: group_state.Counting, layer: int, at: int, n_several: int) -> None:
    """Take the ranks that let the sum of squared times grow least; most tokens first."""
    work, several = c.work, c.work.several
    for i in range(1, n_several):  # those of most tokens first, equal ones in order
        expert, j = several[i], i
        while j > 0 and work.total[several[j - 1]] < work.total[expert]:
            several[j] = several[j - 1]
            j -= 1
        several[j] = expert
    for i in range(n_several):
        _split(c, layer, at, several[i])


@compiled()
def _split(c: group_state.Counting, layer: int, at: int, expert: int) -> None:
    """Choose the instances of one expert by the times of their ranks."""
    work, tokens = c.work, c.work.total[expert]
    homes, n_homes = work.queue, np.int64(0)
    for j in range(c.replicas.n_instances[c.leader, at, expert]):
        rank, known = np.int64(c.replicas.rank[c.leader, at, expert, j]), False
        for i in range(n_homes):
            known = known or homes[i] == rank
        if not known:
            homes[n_homes] = rank
            n_homes += 1
    best, n_best = np.inf, np.int64(0)
    for n in range(1, min(n_homes, tokens) + 1):
        most = (tokens + n - 1) // n
        for i in range(n_homes):  # into order, the fastest first
            seconds, j = _seconds(c, homes[i], most), i
            while j > 0 and work.seconds[j - 1] > seconds:
                work.seconds[j], work.order[j] = work.seconds[j - 1], work.order[j - 1]
                j -= 1
            work.seconds[j], work.order[j] = seconds, homes[i]
        growth = 0.0
        for j in range(n):
            before = _seconds(c, work.order[j], 0)
            growth += work.seconds[j] * work.seconds[j] - before * before
        if growth < best:
            best, n_best = growth, np.int64(n)
            for j in range(n):
                work.chosen[j, layer, expert] = work.order[j]
    work.n_chosen[layer, expert] = n_best
    for j in range(n_best):
        rank = work.chosen[j, layer, expert]
        work.load[rank] += (tokens - j + n_best - 1) // n_best
        work.n_active[rank] += 1


# --- by the token ---


@compiled()
def choose_instance(
    choice: int, ranks: Any, weight: Any, n: int, nodes: int, home: int, hashed: int, counter: int
) -> Any:
    """Return which of ``n`` instances of an expert computes a token (`policies.replicas.base`), in
    numbers, as to hand `Counting` over takes longer. ``choice``: HASH, SOURCE, WEIGHTED or
    LOCAL_FIRST; ``nodes``, ``home``: GPUs of a node, the token's rank; ``hashed``, ``counter``:
    vLLM's hash of the token's place, and what is drawn by."""
    if choice == group_state.HASH:
        return np.int64(hashed % n)
    if choice == group_state.WEIGHTED:
        return _drawn(ranks, weight, n, nodes, home, counter, np.int64(2), False)
    nearest, n_nearest = np.int64(2), 0
    for i in range(n):
        away = _away(np.int64(ranks[i]), home, nodes)
        if away < nearest:
            nearest, n_nearest = away, 0
        if away == nearest:
            n_nearest += 1
    if choice == group_state.LOCAL_FIRST:
        return _drawn(ranks, weight, n, nodes, home, counter, nearest, True)
    skip = hashed % n_nearest
    for i in range(n):
        if _away(np.int64(ranks[i]), home, nodes) == nearest:
            if skip == 0:
                return np.int64(i)
            skip -= 1
    return np.int64(-1)  # not reached


@compiled()
def _drawn(
    ranks: Any, weight: Any, n: int, nodes: int, home: int, counter: int, nearest: int, local: bool
) -> Any:
    """Return the instance drawn by weight among all; ``local``: those as near as ``nearest``."""
    total = 0.0
    for i in range(n):
        if not local or _away(np.int64(ranks[i]), home, nodes) == nearest:
            total += weight[i]
    wanted, total, last = _draw(np.uint64(counter)) * total, 0.0, np.int64(-1)
    for i in range(n):
        if not local or _away(np.int64(ranks[i]), home, nodes) == nearest:
            total += weight[i]
            last = np.int64(i)
            if total > wanted:
                return last
    return last  # not reached


@compiled()
def _draw(counter: Any) -> Any:
    """Return a number from 0 to 1 by a counter, see `policies.replicas.weighted.draws`."""
    z = counter + _ADD
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(32)) / 2.0**32


@compiled()
def _away(rank: int, home: int, gpus_per_node: int) -> Any:
    """Return 0 for a token's own rank, 1 for its node, 2 elsewhere."""
    if rank == home:
        return 0
    return 1 if rank // gpus_per_node == home // gpus_per_node else 2
