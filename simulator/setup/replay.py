"""Fit a routing trace to the served model: one bit-set row a decode step, over all its layers.

A decode step of a request needs its token's experts in each MoE layer. What a trace lacks is filled
in the same way for every policy and reported: *layers* are tiled (model layer ``l`` replays trace
layer ``l mod T``), each tile with the request's tokens rotated by another part of the window, so
that two tiles do not repeat each other's sets; *tokens* beyond those recorded replay the window
again, from a random offset (drawn by the workload)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.jit import lowest, njit
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.placement.base import EMPTY, Placement
from eldr_sim.policies.replicas.weighted import rank_weights
from eldr_sim.simulator.plane.steps.expert_union import PromptRows, make_prompt_rows
from eldr_sim.simulator.plane.steps.group_state import Replicas, no_replicas
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload


@dataclass(frozen=True)
class Replay:
    """Bit sets of the replay windows of some trace requests."""

    #: ``uint64 [rows, moe_layers * words]``: the windows one after the other.
    bits: Words
    #: ``first_row``, ``length``: ``int64 [trace requests]``: each request's window in ``bits``; -1
    #: and 0 where it has none.
    first_row: Ints
    length: Ints
    period: int = 0  #: of the trace: a step's tokens then take this number of first rows in turn

    def activation(self, trace_request: int, offset: int, steps: int, n_experts: int) -> Floats:
        """Share of decode steps in which each expert is active, ``[moe_layers, n_experts]``, over
        ``steps`` rows of ``trace_request``'s window from ``offset`` on, round and round."""
        words = (n_experts + 63) // 64
        count = np.zeros((self.bits.shape[1] // words, words * 64), np.int64)
        _count(
            self.bits,
            self.first_row[trace_request],
            self.length[trace_request],
            offset,
            steps,
            count.reshape(-1),
        )
        return count[:, :n_experts] / steps


def rank_masks(placements: Sequence[Placement], n_experts: int, n_layers: int) -> Words:
    """Return which bits of a row of ``Replay.bits`` belong to each rank's experts, without those of
    several instances: ``uint64 [workers, ranks, n_layers * words]``; ranks that a worker lacks are
    empty."""
    words, layers = -(-n_experts // 64), len(placements[0].expert)
    n_ranks = max(placement.n_ranks for placement in placements)
    held = np.zeros((len(placements), n_ranks, layers, words * 64), np.uint8)
    for worker, placement in zip(held, placements, strict=True):
        single = placement.instances(n_experts) == 1
        on_rank = placement.has_expert(n_experts) & single[:, None]
        worker[: placement.n_ranks, :, :n_experts] = on_rank.swapaxes(0, 1)
    packed = np.packbits(held, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
    # An index would lay 64 experts or fewer out otherwise, and the plane be compiled once more.
    packed = packed.take(np.arange(n_layers) % layers, 2)
    return packed.reshape(len(placements), n_ranks, -1)


def make_replicas(
    placements: Sequence[Placement], n_experts: int, n_layers: int, *, most: int = 1
) -> Replicas | None:
    """Return the instances of experts that have several, ``most`` at most; or None."""
    counts = np.stack([placement.instances(n_experts) for placement in placements])
    if most == 1 and (counts == 1).all():
        return None
    workers, layers, _ = counts.shape
    words = -(-n_experts // 64)
    rank = np.zeros((*counts.shape, max(most, counts.max())), np.int16)
    weight = np.zeros(rank.shape)
    for w, placement in enumerate(placements):
        known = np.ones((layers, placement.n_ranks))
        if placement.load is not None:
            known = rank_weights(placement)
        seen = np.zeros(counts.shape[1:], np.int64)
        every = np.arange(layers)
        for expert, on in zip(placement.expert.T, placement.rank.T, strict=True):
            at = every[expert != EMPTY]
            place = w, at, expert[at], seen[at, expert[at]]
            rank[place], weight[place] = on[at], known[at, on[at]]
            seen[at, expert[at]] += 1
        rank[w] = np.where(np.arange(rank.shape[3]) < seen[..., None], rank[w], rank[w, ..., :1])
    several = np.zeros((2, workers, layers, words * 64), np.uint8)
    several[..., :n_experts] = counts > 1, counts > 2
    packed = np.packbits(several, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
    multi, many = packed.take(np.arange(n_layers) % layers, 2).reshape(2, workers, -1)
    asked = no_replicas().asked
    return Replicas(multi, many, rank, counts.astype(np.int16), weight, asked)


def fit_trace(trace: RoutingTrace, model: ModelDims) -> RoutingTrace:
    """Return the trace with the model's top-k of experts; raises InputError."""
    manifest = trace.manifest
    have = (manifest.n_experts, manifest.top_k)
    need = (model.n_experts, model.top_k)
    if have[0] != need[0] or have[1] < need[1]:
        raise InputError(
            "trace",
            f"{manifest.model} has {have[0]} experts and top-{have[1]}, but {model.name} has "
            f"{need[0]} and top-{need[1]}",
            "--model NAME or FOLDER (with its config.json) of the model that was recorded; a trace "
            f"of {need[0]} experts, top-{need[1]} or more; or none: {model.name}'s is then drawn",
        )
    if manifest.n_layers > model.n_moe_layers:
        raise InputError(
            "trace",
            f"it has {manifest.n_layers} MoE layers, {model.name} only {model.n_moe_layers}",
            f"a trace of at most {model.n_moe_layers} layers, or --model NAME or FOLDER (with its "
            "config.json) of the model that was recorded",
        )
    return trace if have == need else trace.with_top_k(model.top_k)


def no_replay() -> Replay:
    """Return the replay of a dense model: one row without bits, again and again."""
    return Replay(np.zeros((1, 0), np.uint64), np.zeros(1, np.int64), np.ones(1, np.int64))


def make_replay(trace: RoutingTrace, n_layers: int, requests: Ints) -> Replay:
    """Lay out the decode windows of ``requests`` over ``n_layers`` MoE layers: from the last prompt
    token, which a decode worker computes again, to the last recorded one
    (`RoutingTrace.decode_window`)."""
    wanted = np.unique(requests)
    return _lay_out(trace, n_layers, wanted, *trace.decode_window(wanted))


def prompt_rows(trace: RoutingTrace, workload: Workload | None = None) -> PromptRows:
    """Return which trace rows prompts' tokens replay; raises InputError if it has none."""
    trace.require_prompts("the experts of prompts")
    texts = np.arange(trace.n_requests)
    if workload is not None:
        texts = np.union1d(workload.text, workload.prefix_text)
    first_row = trace.first_row.astype(np.int64)
    sets, first_row[texts] = trace.bits_of(first_row[texts], trace.prompt_len[texts])
    bits = sets.reshape(len(sets), -1)
    bits.flags.writeable = False  # as cached ones are: to the compiler that is another type
    return make_prompt_rows(
        bits,
        first_row,
        trace.prompt_len.astype(np.int32),
        np.zeros(1, np.int64) if workload is None else workload.prefix_indptr,
        np.zeros(1, np.int32) if workload is None else workload.prefix_text,
        0 if workload is None else workload.prefix_block_tokens,
    )


def _lay_out(
    trace: RoutingTrace, n_layers: int, wanted: Ints, source: Ints, rows: NDArray[np.integer]
) -> Replay:
    """Lay out ``rows`` rows of each wanted request from row ``source`` of the trace on."""
    first_row = np.full(len(trace.prompt_len), -1, np.int64)
    length = np.zeros(len(trace.prompt_len), np.int64)
    length[wanted] = rows
    first_row[wanted] = np.cumsum(length[wanted]) - length[wanted]
    sets, source = trace.bits_of(source, rows)
    flat = sets.reshape(len(sets), -1)
    words = sets.shape[2]
    bits = _aligned((int(length[wanted].sum()), n_layers * words))
    _tile(flat, source, first_row[wanted], length[wanted], bits)
    if trace.period and (trace.n_layers < n_layers or trace.period > rows[0]):
        have = f"{trace.n_layers} layers, requests of {rows[0]} tokens"
        raise InputError("routing", have, f"{n_layers} layers, {trace.period} tokens to go by turn")
    return Replay(bits, first_row, length, trace.period)


def _aligned(shape: tuple[int, int]) -> Words:
    """Return an array that begins a cache line, so that its rows span as few of them as can be."""
    line = 64 // 8
    room = np.empty(shape[0] * shape[1] + line, np.uint64)
    skipped = -room.ctypes.data // 8 % line
    return room[skipped : len(room) - line + skipped].reshape(shape)


def _tile(flat: Words, source: Ints, target: Ints, length: Ints, out: Words) -> None:
    """Copy each window, tile by tile, rotated by ``tile / tiles`` of its length."""
    have, need = flat.shape[1], out.shape[1]
    tiles = range(-(-need // have))
    for begin, at, n in zip(source.tolist(), target.tolist(), length.tolist(), strict=True):
        for t in tiles:
            shift, columns = t * n // len(tiles), slice(t * have, min((t + 1) * have, need))
            width = columns.stop - columns.start
            window, copy = flat[begin : begin + n, :width], out[at : at + n, columns]
            copy[: n - shift], copy[n - shift :] = window[shift:], window[:shift]


@njit()
def _count(bits: Any, first: int, span: int, offset: int, steps: int, out: Any) -> None:
    """Count in how many of ``steps`` rows, from ``offset`` round the window, each bit is set."""
    whole, rest = steps // span, steps % span
    for p in range(span):
        times = whole + ((p - offset) % span < rest)
        if times == 0:
            continue
        for k in range(bits.shape[1]):
            word = bits[first + p, k]
            while word != 0:
                out[64 * k + lowest(word)] += times
                word &= word - np.uint64(1)


#: Checksum of a trace, experts of a token, MoE layers of the model that replays it.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class SharedReplay:
    """Where another process finds a replay; good as long as its maker lives."""

    key: Key
    path: str
    shape: tuple[int, ...]
    first_row: Ints
    length: Ints
    period: int


_made: dict[Key, SharedReplay] = {}
_mapped: dict[Key, Replay] = {}
_kept: dict[Key, Replay] = {}


def replay_of(trace: RoutingTrace, top_k: int, n_layers: int, requests: Ints) -> Replay:
    """Return a replay of trace requests: the last one made if it has them, else a new one."""
    key = trace.manifest.checksum, top_k, n_layers
    for known in (_mapped, _kept):
        if key in known and bool((known[key].length[requests] > 0).all()):
            return known[key]
    if key in _kept:
        requests = np.union1d(requests, np.flatnonzero(_kept[key].length))
    _kept.clear()  # first: two of them need not be in memory together
    _kept[key] = make_replay(trace, n_layers, requests)
    return _kept[key]


def share(trace: RoutingTrace, top_k: int, n_layers: int) -> SharedReplay | None:
    """Lay out a trace's serving requests, once, for other processes; None: impossible."""
    key = trace.manifest.checksum, top_k, n_layers
    if key in _made or not hasattr(os, "memfd_create"):
        return _made.get(key)
    replay = make_replay(trace, n_layers, np.flatnonzero(~trace.is_calibration))
    file = os.memfd_create("eldr-sim-replay")
    with os.fdopen(os.dup(file), "wb") as out:
        replay.bits.tofile(out)
    path = f"/proc/{os.getpid()}/fd/{file}"
    where = replay.bits.shape, replay.first_row, replay.length, replay.period
    _made[key] = SharedReplay(key, path, *where)
    return _made[key]


def use(shared: SharedReplay) -> None:
    """Map a replay that another process shares; done before is done."""
    if shared.key in _mapped:
        return
    try:
        # Copy on write, not read-only: to numba that is another type, and all kernels anew.
        bits = np.asarray(np.memmap(shared.path, np.uint64, "c", shape=shared.shape))
    except OSError:  # its maker is gone, or we may not look into it
        return
    _mapped[shared.key] = Replay(bits, shared.first_row, shared.length, shared.period)
