"""When the requests of a workload arrive: drawn, or as a request log recorded them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_columns import chain_blocks, others_each_round
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.traces.requests.logs.request_logs import RequestLog

#: Where a request log's arrival times come from.
Arrivals = Literal["recorded", "poisson", "closed", "agentx"]

MAX_REQUESTS = 10_000_000  #: most requests of a workload
#: Highest shape of the gamma distribution: gaps then differ by 0.003%, and more is not drawn.
MOST_BURSTINESS = 1e9
_MOST_RATE = 1e9


def draw_arrivals(
    rate: float, burstiness: float, horizon_s: float | None, num_requests: int | None, seed: int
) -> Floats:
    """Draw arrival times, s, with gamma-distributed gaps (see `Load`) up to one bound."""
    if math.isinf(rate):
        return np.zeros(num_requests or 0)
    if rate > _MOST_RATE:  # times are whole nanoseconds: none would pass
        problem = f"got {rate:g}: gaps would be below a nanosecond"
        raise InputError("request_rate", problem, f"at most {_MOST_RATE:g}, or inf")
    rng = stream(seed, "arrivals")

    def gaps_ns(count: int) -> Ints:
        # Whole nanoseconds: sums are exact, and last bits of the machines' log or pow do not show.
        gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count)
        if not float(gaps.max()) < 2**63 / 1e9 / max(count, 1):
            problem = f"got {rate}: arrivals would be centuries apart"
            raise InputError("request_rate", problem, "a higher rate")
        return np.rint(gaps * 1e9).astype(np.int64)

    if num_requests is not None:
        arrivals = np.cumsum(gaps_ns(num_requests))
    else:
        assert horizon_s is not None
        expected = rate * horizon_s
        if expected > MAX_REQUESTS:
            raise InputError(
                "horizon_s",
                f"{horizon_s:,.15g} s in all at {rate:g} requests/s are {expected:.3g} requests",
                f"at most {MAX_REQUESTS:,}",
            )
        arrivals = np.empty(0, np.int64)
        last, end = 0, horizon_s * 1e9
        while last < end:
            more = last + np.cumsum(gaps_ns(int(expected / 8) + 64))
            arrivals = np.concatenate([arrivals, more])
            last = int(more[-1])
        arrivals = arrivals[arrivals < end]
    return arrivals / 1e9


def recorded_arrivals(
    log: RequestLog, rate: float | None, horizon_s: float | None, num_requests: int | None
) -> Floats:
    """Return the arrivals of a log, s, stretched evenly to a rate if there is one."""
    arrival_s = log.arrival_s
    if num_requests is not None:
        if num_requests > len(arrival_s):
            allowed = f"1..{len(arrival_s)}, the requests of {log.path.name}, or --arrivals poisson"
            raise InputError("num_requests", f"got {num_requests}", allowed)
        arrival_s = arrival_s[:num_requests]
    if rate is not None:
        span = float(arrival_s[-1])
        if math.isinf(rate):
            return np.zeros(len(arrival_s))
        if len(arrival_s) > 1 and span <= 0:
            problem = f"got {rate}, but all requests of {log.path.name} arrive at once"
            raise InputError("request_rate", problem, "inf, or --arrivals poisson")
        scale = (len(arrival_s) - 1) / (rate * span) if span else 1.0
        arrival_s = np.rint(arrival_s * scale * 1e9) / 1e9
    return arrival_s if horizon_s is None else arrival_s[arrival_s < horizon_s]


def repeated(log: RequestLog, n: int) -> RequestLog:
    """Return the first ``n`` requests of a log that begins again, as others, when it ends."""
    size = len(log.prompt_len)
    rounds = -(-n // size)
    if rounds == 1:
        return log
    blocks = chain_blocks(log.prefix_hash, log.prefix_indptr)
    begins = log.prefix_indptr[:-1] + np.arange(rounds)[:, None] * int(log.prefix_indptr[-1])
    return replace(
        log,
        prompt_len=np.tile(log.prompt_len, rounds),
        output_len=np.tile(log.output_len, rounds),
        session=others_each_round(log.session, rounds),
        priority=None if log.priority is None else np.tile(log.priority, rounds),
        prefix_hash=others_each_round(blocks, rounds),
        prefix_indptr=np.append(begins.ravel(), rounds * int(log.prefix_indptr[-1])),
        parent=None,
        joins=None,  # arrivals that are drawn know no parent
    )


def describe_arrivals(
    log: RequestLog | None, rate: float | None, burstiness: float, drawn: bool
) -> str:
    """Say where arrivals come from, for the result."""
    if rate is not None and math.isinf(rate):
        return "all at 0"
    if log is None or drawn:
        law = "Poisson" if burstiness == 1 else f"gamma with shape {burstiness:g}"
        return law if log is None else f"{law}, lengths recorded ({log.format})"
    if not log.timed:
        return f"Poisson at the rate, once, lengths recorded ({log.format})"
    how = "drawn at the file's rate" if log.header.times.startswith("drawn") else "recorded"
    return f"{how} ({log.format})" + ("" if rate is None else ", stretched to the rate")
