"""Which part of a request log a run replays, and which requests of it are measured.

Without a choice all is, from an empty cluster to the last answer. A part is warmed up by the
requests before it, and requests go on behind it until those measured have ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from eldr_sim.traces.requests.logs.request_logs import RequestLog

#: A measured part whose rate differs by this factor from the log's is not like the log.
_UNLIKE = 0.1


@dataclass(frozen=True)
class LogPart:
    """A part of a log; times are seconds of the log."""

    replayed: tuple[float, float]  #: begin and end of what is replayed; the end is not in it
    measured: tuple[float, float]  #: begin and end of what is measured
    stretch: float = 1.0  #: seconds of the run for each of the log; 0 sends all at once
    busiest_s: float | None = None  #: length of the busiest part, if it is that

    @property
    def window(self) -> tuple[float, float]:
        """Begin and end of the measured window, seconds of the run; the end may be infinite."""
        begin = self.replayed[0]
        # Whole nanoseconds, as arrivals are: the first request measured is at the begin.
        start, stop = (
            float(np.rint((at - begin) * (self.stretch or 1.0) * 1e9)) / 1e9 for at in self.measured
        )
        return start, stop if self.stretch and not math.isinf(stop) else math.inf

    def first(self, log: RequestLog) -> int:
        """Return the number of the first request that is replayed."""
        return int(np.searchsorted(log.arrival_s, self.replayed[0], side="left"))

    def cut(self, log: RequestLog) -> RequestLog:
        """Return the requests that are replayed, with arrivals in seconds of the run."""
        first = self.first(log)
        last = int(np.searchsorted(log.arrival_s, self.replayed[1], side="left"))
        times = (log.arrival_s[first:last] - self.replayed[0]) * self.stretch
        indptr = log.prefix_indptr[first : last + 1]
        _, session = np.unique(log.session[first:last], return_inverse=True)
        goes_on: dict[str, Any] = {}
        if log.parent is not None and log.gap_s is not None and log.after_end is not None:
            goes_on = {"gap_s": log.gap_s[first:last], "after_end": log.after_end[first:last]}
            goes_on["parent"] = np.maximum(log.parent[first:last] - first, -1)
            if log.joins is not None:
                kept = ((log.joins >= first) & (log.joins < last)).all(axis=1)
                goes_on["joins"] = log.joins[kept] - first
        return replace(
            log,
            arrival_s=np.rint(times * 1e9) / 1e9,
            prompt_len=log.prompt_len[first:last],
            output_len=log.output_len[first:last],
            session=session.astype(np.int32),
            priority=None if log.priority is None else log.priority[first:last],
            prefix_hash=log.prefix_hash[indptr[0] : indptr[-1]],
            prefix_indptr=indptr - indptr[0],
            **goes_on,
        )


def choose_part(
    log: RequestLog,
    *,
    since: float | None = None,
    until: float | None = None,
    busiest: float | None = None,
    warmup_s: float = 0.0,
    rate: float | None = None,
) -> LogPart:
    """Return the part of a log that a run replays; raises InputError if the log has none such.

    ``since``, ``until``: the measured part, seconds of the log; ``busiest``: length of the busiest,
    in their place; ``warmup_s``: of the run before it; ``rate``: mean requests per second to which
    the part is stretched; ``inf``: all at once."""
    times, end = log.arrival_s, float(log.arrival_s[-1])
    name = log.path.name
    if busiest is not None:
        if busiest >= end:
            raise InputError("busiest", f"{busiest:g} s of the {end:g} s of {name}", "less")
        counts = np.searchsorted(times, times + busiest, side="left") - np.arange(len(times))
        since = float(times[np.argmax(counts)])
        until = since + busiest
    begin = 0.0 if since is None else since
    if since is not None and since > end:
        raise InputError("log_from", f"{since:g} s, but {name} ends at {end:g} s", "less")
    stop = math.inf if until is None or until > end else until
    if stop <= begin:
        raise InputError("log_to", f"{until:g} s is not after {begin:g} s", "a later time")
    n = int(((times >= begin) & (times < stop)).sum())
    if not n:
        problem = f"no request of {name} arrives from {begin:g} to {stop:g} s"
        raise InputError("log_from" if until is None else "log_to", problem, "another part")
    stretch = 1.0
    if rate is not None:
        own = _rate(n, begin, stop, end)
        if math.isinf(rate):
            return LogPart((begin, stop), (begin, stop), 0.0, busiest)
        if own is None and n > 1:
            problem = f"got {rate}, but all requests of {name} arrive at once"
            raise InputError("request_rate", problem, "inf, or --arrivals poisson")
        stretch = 1.0 if own is None else own / rate
    warm = max(0.0, begin - warmup_s / stretch)
    # Requests measured last still see the load: what follows goes on for as long again.
    after = math.inf if math.isinf(stop) else stop + (stop - begin)
    return LogPart((warm, after), (begin, stop), stretch, busiest)


def _rate(n: int, begin: float, stop: float, end: float) -> float | None:
    """Return the mean rate of n requests of a log that ends with the arrival at ``end``."""
    if stop > end:  # what begins and ends with an arrival has one gap less than requests
        n, stop = n - 1, end
    return n / (stop - begin) if stop > begin and n else None


def describe_part(
    log: RequestLog,
    arrival_s: Floats,
    window: tuple[float, float],
    part: LogPart | None,
    rate: float | None = None,
) -> dict[str, Any]:
    """Return what of a log is measured, for the result: counts, seconds of the log, its rates.
    ``arrival_s``, ``window``: seconds of the run; ``part``: what is replayed, None: from the first
    request on; ``rate``: to which it is stretched."""
    times, end = log.arrival_s, float(log.arrival_s[-1])
    last = end
    has_rate = rate is not None and (part is not None or math.isinf(window[1]))
    if part is None:  # a number of first requests, or those of a number of first seconds
        last = float(times[len(arrival_s) - 1])
        part = LogPart((0.0, math.inf), (0.0, math.inf), float(arrival_s[-1]) / last if last else 1)
    n = int(((arrival_s >= window[0]) & (arrival_s < window[1])).sum())
    begin, stop = part.measured[0], min(part.measured[1], last)
    if part.stretch:
        begin, stop = (part.replayed[0] + at / part.stretch for at in window)
    description = _rate(n, begin, math.inf if stop >= last else stop, last)
    stop = min(stop, last)
    whole = _rate(len(times), 0.0, math.inf, end)
    if not log.timed:  # its seconds are the run's
        end, begin, stop = (part.stretch * at for at in (end, begin, stop))
        description, whole = (each / part.stretch if each and part.stretch else None
                        for each in (description, whole))  # fmt: skip
    return {
        "requests": len(times),
        "measured": n,
        "seconds": end,
        "from_s": begin,
        "to_s": stop,
        "rate": description,
        "log_rate": whole,
        **({} if part.busiest_s is None else {"busiest_s": part.busiest_s}),
        **({"has_rate": True} if has_rate else {}),
    }


def part_in_words(part: dict[str, Any]) -> str:
    """Return what `describe_part` found as text."""
    if part["measured"] == part["requests"]:
        rate = "" if part["log_rate"] is None else f", {part['log_rate']:.1f}/s"
        return f"all {part['requests']:,} requests of the log, {part['seconds']:,.0f} s{rate}"
    rates = ""
    if part["rate"] is not None and part["log_rate"] is not None:
        rates = f", {part['rate']:.1f}/s there, {part['log_rate']:.1f}/s on the log"
    busiest = "the busiest, " if "busiest_s" in part else ""
    return (
        f"{part['measured']:,} of {part['requests']:,} requests, {busiest}"
        f"{part['from_s']:,.0f}-{part['to_s']:,.0f} s of {part['seconds']:,.0f} s{rates}"
    )


def part_warnings(part: dict[str, Any]) -> list[str]:
    """Say where the measured part differs from the log without an option for it."""
    rate, whole = part["rate"], part["log_rate"]
    known = "busiest_s" in part or part.get("has_rate")
    if known or rate is None or whole is None or abs(rate / whole - 1.0) <= _UNLIKE:
        return []
    return [
        f"the measured part of the log has {rate:.1f} requests/s, the log {whole:.1f}: its figures "
        "are not the log's (leave out what cuts it, or --busiest 10m for its peak)"
    ]
