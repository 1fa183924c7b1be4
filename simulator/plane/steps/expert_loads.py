"""Tokens of every expert over a window of steps, counted as a group steps, by which it relocates
(`relocation`). Bit planes live on: what `group_counting` has counted is added to 64 experts at
once. The last ``window % interval`` steps are counted apart, so any window is a sum of parts."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints, Words
from eldr_sim.simulator.plane.compiled import ask, compiled
from eldr_sim.simulator.plane.steps.bit_planes import add_planes

#: What the loop asks besides a router: for a placement, or to put one in force.
ASK, PUT_IN_FORCE = np.int64(-1), np.int64(-2)
#: The two parts of an interval.
EARLY, LATE = 0, 1
_PLANES = 40  # bits of a counter
_NEVER = np.int64(1) << 60


class ExpertLoads(NamedTuple):
    """The counters of all groups, at their leaders, and when they relocate."""

    planes: Words  #: ``[workers, 2, bits, layers * words]``: of EARLY and LATE steps
    from_step: Ints  #: ``[workers, 2]``: the first EARLY and the first LATE step
    part: Ints  #: ``[workers]``: which part the step belongs to, or -1
    due: Ints  #: ``[workers]``: ask for a placement after so many steps
    end_s: Floats  #: ``[workers]``: end of the step after which that was
    stall_s: Floats  #: ``[workers]``: how long the group waits for it
    arrival_s: Floats  #: ``[workers]``: when a placement under way can be in force


def make_expert_loads(n_workers: int, width: int) -> ExpertLoads:
    """Return counters of zero for rows of ``width`` words (0 where none ever relocates)."""
    return ExpertLoads(
        planes=np.zeros((n_workers, 2, _PLANES, width), np.uint64),
        from_step=np.full((n_workers, 2), _NEVER),
        part=np.full(n_workers, -1),
        due=np.full(n_workers, _NEVER),
        end_s=np.zeros(n_workers),
        stall_s=np.zeros(n_workers),
        arrival_s=np.full(n_workers, np.inf),
    )


def take_counts(loads: ExpertLoads, leader: int, n_experts: int) -> Ints:
    """Return the tokens of every expert, ``[2, layers, experts]``, and count anew."""
    planes = loads.planes[leader]
    words = -(-n_experts // 64)
    as_bytes = planes.astype("<u8").view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=-1, bitorder="little")
    weights = np.int64(1) << np.arange(_PLANES)
    counts = np.einsum("b,pbk->pk", weights, bits, dtype=np.int64)
    planes[:] = 0
    return np.asarray(counts.reshape(2, -1, 64 * words)[:, :, :n_experts], np.int64)


@compiled()
def begin_step(loads: ExpertLoads, leader: int, n_steps: int, start: float, decide: Any) -> Any:
    """Prepare a group's step after ``n_steps`` others; False if ``decide`` has failed."""
    if start >= loads.arrival_s[leader] and ask(decide, PUT_IN_FORCE, leader) < 0:
        return False
    loads.part[leader] = -1
    if n_steps >= loads.from_step[leader, LATE]:
        loads.part[leader] = LATE
    elif n_steps >= loads.from_step[leader, EARLY]:
        loads.part[leader] = EARLY
    return True


@compiled()
def add_counts(loads: ExpertLoads, leader: int, counted: Any, n_planes: int, carry: Any) -> None:
    """Add what ``n_planes`` bit planes have counted of a step, ``[bits, layers * words]``."""
    add_planes(loads.planes[leader, loads.part[leader]], counted, n_planes, carry)


@compiled()
def end_step(loads: ExpertLoads, leader: int, n_steps: int, end: float, decide: Any) -> Any:
    """Relocate if due; returns the seconds that the group waits, below 0: it failed."""
    if n_steps != loads.due[leader]:
        return 0.0
    loads.end_s[leader] = end
    if ask(decide, ASK, leader) < 0:
        return -1.0
    return loads.stall_s[leader]
