"""Replays laid out once for the runs of a process, and mapped by many processes.

The bit sets of a run are its largest array, and runs of one trace and model have the same. The
process that starts others lays them out in a file without a name and tells the others where: each
maps it, and its pages are in memory once. The file is gone with the last process that maps it,
whatever ends them. Where there is no such file (not Linux) every process lays out its own.
"""

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.setup.replay import Replay, make_replay
from eldr_sim.traces.routing.format import RoutingTrace

#: Checksum of a trace, experts of a token, MoE layers of the model that replays it.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class SharedReplay:
    """Where another process finds a replay; good as long as its maker lives."""

    key: Key
    path: str
    shape: tuple[int, ...]
    first_row: NDArray[np.int64]
    length: NDArray[np.int64]
    period: int


_made: dict[Key, SharedReplay] = {}
_mapped: dict[Key, Replay] = {}
_kept: dict[Key, Replay] = {}


def replay_of(
    trace: RoutingTrace, top_k: int, n_layers: int, requests: NDArray[np.int64]
) -> Replay:
    """Return a replay of some trace requests: one that is there if it has them, else a new one.

    The last one made is kept for the next run of this process.
    """
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
    """Lay out all serving requests of a trace for other processes; None where that cannot be.

    Done once for a trace and model: the file stays for as long as this process lives.
    """
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
