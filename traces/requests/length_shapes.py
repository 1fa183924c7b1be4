"""Requests of a log, with prompt lengths distributed in another shape.

Gimbal (Sun et al., Sec. V-A) samples 1,000 requests of BurstGPT in five shapes, which its Figure 5
shows and nothing defines. Ours: with x, from 0 to 1, the prompt length between 1 token and what
97.6% of the log's prompts do not exceed (3,000 tokens in BurstGPT, Sec. V-A.2), the density of x is
``random``: the log's own, longer prompts too; ``central``: ``2 - |4x - 2|``; ``descending``:
``2 - 2x``; ``two_end``: ``|4x - 2|``; ``average``: 1. Requests are drawn without repetition, the
fitting number of each twentieth of x; they keep their outputs, sessions, prefixes and order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from eldr_sim.errors import InputError

if TYPE_CHECKING:  # the names of the shapes are read by every command, the arrays by few
    import numpy as np
    from numpy.typing import NDArray

    from eldr_sim.arrays import Ints
    from eldr_sim.traces.requests.logs.request_logs import RequestLog

LengthShape = Literal["random", "central", "descending", "two_end", "average"]
"""Shapes of the distribution of prompt lengths."""
LENGTH_SHAPES: tuple[LengthShape, ...] = get_args(LengthShape)
_WITHIN = 0.976  # share of the prompts below the longest of a shape (Sec. V-A.2)
_PARTS = 20


def shaped_log(log: RequestLog, shape: LengthShape, n: int, seed: int) -> RequestLog:
    """Return ``n`` requests of a log in a shape, with their times; raises InputError."""
    import numpy as np

    chosen = draw_by_length(log.prompt_len, shape, n, seed)
    arrival_s = log.arrival_s[chosen]
    begins, ends = log.prefix_indptr[chosen], log.prefix_indptr[chosen + 1]
    blocks = [log.prefix_hash[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    return replace(
        log,
        parent=None,
        arrival_s=arrival_s - arrival_s[0],
        prompt_len=log.prompt_len[chosen],
        output_len=log.output_len[chosen],
        session=log.session[chosen],
        priority=None if log.priority is None else log.priority[chosen],
        prefix_hash=np.concatenate(blocks),
        prefix_indptr=np.concatenate([[0], np.cumsum(ends - begins)]),
    )


def draw_by_length(prompt_len: NDArray[np.integer], shape: LengthShape, n: int, seed: int) -> Ints:
    """Draw ``n`` requests with lengths of a shape: indices, ascending; raises InputError."""
    import numpy as np

    from eldr_sim.traces.streams import stream

    if shape not in LENGTH_SHAPES:
        raise InputError("length_shape", repr(shape), ", ".join(LENGTH_SHAPES))
    rng, total = stream(seed, "length-shape"), len(prompt_len)
    if shape == "random":
        _check(n, total, "requests")
        return np.sort(rng.choice(total, n, replace=False))
    longest = max(2.0, float(np.quantile(prompt_len, _WITHIN)))
    x = (np.asarray(prompt_len, np.float64) - 1.0) / (longest - 1.0)
    part = np.minimum((x * _PARTS).astype(np.int64), _PARTS - 1)
    middle = (np.arange(_PARTS) + 0.5) / _PARTS
    density = {
        "central": 2.0 - np.abs(4.0 * middle - 2.0),
        "descending": 2.0 - 2.0 * middle,
        "two_end": np.abs(4.0 * middle - 2.0),
        "average": np.ones(_PARTS),
    }[shape]
    chosen = []
    for k, wanted in enumerate(rng.multinomial(n, density / density.sum()).tolist()):
        members = np.flatnonzero((part == k) & (x <= 1.0))
        edges = 1.0 + (longest - 1.0) * (k + np.arange(2)) / _PARTS
        _check(wanted, len(members), f"requests of {edges[0]:.0f} to {edges[1]:.0f} prompt tokens")
        chosen.append(rng.choice(members, wanted, replace=False))
    return np.sort(np.concatenate(chosen))


def _check(wanted: int, known: int, what: str) -> None:
    if wanted > known:
        problem = f"the shape takes {wanted} {what}, and the log has {known}"
        raise InputError("num_requests", problem, "fewer, or a longer log")
