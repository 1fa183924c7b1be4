"""What the decode steps of a measured window add up to: their log is read once, part by part."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats, Int32s, Ints, Records
from eldr_sim.simulator.control.record import RunRecord, within
from eldr_sim.simulator.outcome.sums import exact_sums, in_parts
from eldr_sim.simulator.setup.config.conditional import parse_conditional
from eldr_sim.simulator.setup.config.pools import WorkerPool


class WindowSteps(NamedTuple):
    """Sums over the steps that begin in a window."""

    #: Steps that are ``decoding``; over all of them ``sequences``, ``outputs``, ``plain`` experts
    #: and the ``verified`` ones of steps with some, and ``prompt_tokens`` of workers that compute
    #: requests' prompts; over those that decode ``active`` and ``busiest`` experts, and
    #: ``active_outputs``, active experts times outputs.
    n: dict[str, int]
    by_active: Ints  #: steps that decode by their active experts
    #: Gaps between tokens, s, and how many there are of each.
    gaps: Floats
    carried: Int32s
    decoding_s: float  #: of the steps that decode,
    draft_s: float  #: and of them of drafts


def steps_within(record: RunRecord, start: float, end: float) -> Iterator[Records]:
    """Yield the decode steps that begin from ``start`` to ``end``, s, in parts, one at least."""
    for part in in_parts(record.decode_steps):
        yield within(part, (part["start"] >= start) & (part["start"] < end))


def window_steps(record: RunRecord, computes: Bools, start: float, end: float) -> WindowSteps:
    """Add up the decode steps that begin from ``start`` to ``end``, s; ``computes``: see
    `computes_prompts`."""
    resumed = record.gaps["resumed_s"]
    preempted = (resumed - record.gaps["last_token_s"])[(start <= resumed) & (resumed <= end)]
    most, at = len(record.decode_steps) + len(preempted) + 1, 0
    gaps, carried = np.empty(most), np.empty(most, np.int32)
    n, by_active = Counter[str](), np.zeros(0, np.int64)
    seconds: list[tuple[Floats, ...]] = []

    for steps in steps_within(record, start, end):
        mine = slice(at, at + len(steps))
        at = mine.stop
        lasted = np.subtract(steps["end"], steps["start"], out=gaps[mine])
        carried[mine] = steps["sequences"] - steps["joined"] - steps["rested"]
        decoding = steps["sequences"] > 0
        n["decoding"] += int(np.count_nonzero(decoding))
        for name in ("sequences", "outputs", "plain"):
            n[name] += int(steps[name].sum())
        if record.drafted is not None:
            n["verified"] += int(steps["active"][steps["plain"] > 0].sum())
            seconds.append((lasted[decoding], steps["draft_s"][decoding]))
        n["prompt_tokens"] += int(steps["chunk_tokens"][computes[steps["worker"]]].sum())
        active = steps["active"][decoding]
        n["active"] += int(active.sum())
        n["active_outputs"] += int(active.astype(np.int64) @ steps["outputs"][decoding])
        n["busiest"] += int(steps["busiest"][decoding].sum())
        by_active = added(by_active, np.bincount(active))
    gaps[at : at + len(preempted)], carried[at : at + len(preempted)] = preempted, 1
    at += len(preempted)
    gaps[at], carried[at] = 0.0, n["outputs"] - n["sequences"]  # yielded together
    lasted_s, draft_s = exact_sums(seconds) if seconds else (0.0, 0.0)
    return WindowSteps(n, by_active, gaps[: at + 1], carried[: at + 1], lasted_s, draft_s)


def computes_prompts(pools: Sequence[WorkerPool], conditional: str | None) -> Bools:
    """Return which workers that decode compute requests' prompts, too, ``[workers]``.

    ``conditional``: the rule by which decode workers compute prompts that others would."""
    fetching = {name for pool in pools for name in pool.takes_over}
    if parse_conditional(conditional).entry:
        fetching.clear()
    decoding = [pool for pool in pools if pool.decodes]
    n_engines = [pool.workers * pool.parallelism.data_parallel_size for pool in decoding]
    computes = np.array([pool.name not in fetching for pool in decoding], np.bool_)
    return np.repeat(computes, n_engines)


def added(some: Ints, others: Ints) -> Ints:
    """Return the sum of counts, the shorter of which go on with 0."""
    short, long = sorted((some, others), key=len)
    long[: len(short)] += short
    return long


def share(part: float, whole: float) -> float | None:
    """Return a share, None of nothing."""
    return part / whole if whole else None
