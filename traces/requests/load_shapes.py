"""How the rate of arrivals changes while a run lasts: ``--load``.

``sine:LOW,HIGH,period=900``: requests per second from LOW, at 0, to HIGH and back in each period;
``ladder:15,2,10@150``: these rates, each for 150 seconds; a CSV with columns ``t_s,rate``, each
rate to the next line's time, the last for as long as the one before; an export of usage or of
Prometheus's (`aggregates`); or a request log, counted minute by minute. A shape begins again when
it ends. Arrivals are drawn at the rate 1 and moved by the integral of the rate (inversion; Cinlar,
Introduction to Stochastic Processes, 1975, sec. 4.7): two rates under one seed have the same n-th
request, and a Poisson process stays one."""

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text, seconds
from eldr_sim.traces.requests.arrivals import MAX_REQUESTS, draw_arrivals

#: Pieces of a sine's period, in each of which the rate is its mean there; s of a log's pieces.
_PIECES, _LOG_PIECE_S = 360, 60.0
_ALLOWED = "sine:1,24,period=900, ladder:15,2,10@150, or a file with t_s,rate or of requests"


@dataclass(frozen=True, eq=False)
class LoadShape:
    """A rate that is constant in pieces: ``rates`` ``[n]``, 1/s, from ``edges_s`` ``[n + 1]``."""

    edges_s: Floats
    rates: Floats

    @property
    def span_s(self) -> float:
        """How long it takes until it begins again, s."""
        return float(self.edges_s[-1])

    @property
    def mean(self) -> float:
        """Mean rate, requests per second."""
        return float(self._integral[-1]) / self.span_s

    @property
    def _integral(self) -> Floats:
        return np.concatenate([[0.0], np.cumsum(self.rates * np.diff(self.edges_s))])

    def expected(self, at_s: Floats | float) -> Floats:
        """Return the requests expected from 0 to each time, s."""
        rounds, rest = np.divmod(np.asarray(at_s, np.float64), self.span_s)
        integral = self._integral
        return np.asarray(rounds * integral[-1] + np.interp(rest, self.edges_s, integral))

    def when(self, expected: Floats) -> Floats:
        """Return the times, s, at which numbers of requests are expected."""
        integral = self._integral
        rounds, rest = np.divmod(expected, integral[-1])
        # A piece without requests has one count and two ends: the one at which they go on.
        busy = np.flatnonzero(self.rates > 0.0)
        piece = busy[np.searchsorted(integral[busy], rest, side="right") - 1]
        inside = (rest - integral[piece]) / self.rates[piece]
        return np.asarray(rounds * self.span_s + self.edges_s[piece] + inside)

    def draw(
        self, rate: float, burstiness: float, horizon_s: float | None, n: int | None, seed: int
    ) -> Floats:
        """Draw arrivals, s, whole nanoseconds, with a mean ``rate``; raises InputError."""
        scale = rate / self.mean
        until = None if horizon_s is None else float(self.expected(horizon_s)) * scale
        if until is not None and until > MAX_REQUESTS:
            problem = f"{until:.3g} requests in {horizon_s:,.15g} s"
            raise InputError("load", problem, f"at most {MAX_REQUESTS:,}")
        if until == 0.0:
            return np.zeros(0)
        drawn = draw_arrivals(1.0, burstiness, until, n, seed)
        return np.rint(self.when(drawn / scale) * 1e9) / 1e9


def load_shape(text: str, time_unit: str | None = None, columns: str | None = None) -> LoadShape:
    """Return the shape that ``--load`` names; raises InputError where it names none.
    ``time_unit``, ``columns``: of the times and the columns of a log that does not say them."""
    file = Path(text)
    return _known(text, file.stat().st_mtime_ns if file.is_file() else 0, time_unit, columns)


@lru_cache(maxsize=16)
def _known(text: str, _changed: int, time_unit: str | None, columns: str | None) -> LoadShape:
    kind, _, rest = text.partition(":")
    if kind in ("sine", "sin") and rest:
        shape = _sine(text, rest)
    elif kind == "ladder" and rest:
        values, _, lasts = rest.partition("@")
        each = _positive(text, lasts)
        rates = _numbers(text, values)
        shape = LoadShape(np.arange(len(rates) + 1.0) * each, np.array(rates))
    elif Path(text).is_file():
        shape = _rates(text) or _of_counts(text) or _of_log(text, time_unit, columns)
    else:
        raise InputError("load", f"{text!r} is neither a shape nor a file", _ALLOWED)
    if not (shape.rates >= 0.0).all() or not np.isfinite(shape.rates).all() or shape.mean <= 0.0:
        raise InputError("load", f"{text}: rates", "numbers from 0 on, not all 0")
    return shape


def _numbers(text: str, values: str) -> list[float]:
    try:
        return [float(part) for part in values.split(",")]
    except ValueError:
        raise InputError("load", repr(text), _ALLOWED) from None


def _positive(text: str, time: str) -> float:
    length = seconds(time, "load") if time else 0.0
    if not 0.0 < length <= 1e9:
        raise InputError("load", f"{text!r}: {time or 'no'} seconds", "a time above 0, to 1e9 s")
    return length


def _sine(text: str, rest: str) -> LoadShape:
    values, _, period = rest.partition(",period=")
    low_high = _numbers(text, values)
    if len(low_high) != 2 or low_high[0] > low_high[1]:
        raise InputError("load", repr(text), "sine:LOW,HIGH,period=SECONDS")
    turn = np.linspace(0.0, 2.0 * np.pi, _PIECES + 1)
    low, high = low_high
    waves = np.diff(np.sin(turn)) / np.diff(turn)  # the mean of the cosine in each piece
    edges = np.linspace(0.0, _positive(text, period or "900"), _PIECES + 1, dtype=np.float64)
    return LoadShape(edges, np.maximum((high + low) / 2.0 - (high - low) / 2.0 * waves, 0.0))


def _rates(path: str) -> LoadShape | None:
    """Read a table of rates; None where the file is none."""
    with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
        if file.readline().replace(" ", "").strip() != "t_s,rate":
            return None
    rows = [row for row in csv.reader(read_text(path, "load").splitlines()[1:]) if row]
    try:
        times, rates = np.array(rows, np.float64).T
    except ValueError:
        raise InputError("load", f"{path}: a line is not two numbers", "t_s,rate") from None
    if len(times) < 2 or times[0] != 0.0 or not (np.diff(times) > 0.0).all():
        raise InputError("load", f"{path}: times", "two or more, from 0 on, ascending")
    return LoadShape(np.append(times, 2.0 * times[-1] - times[-2]), rates)


def _of_counts(path: str) -> LoadShape | None:
    """Read a file of counts over time; None where it is none."""
    from eldr_sim.traces.requests.logs.request_logs import rates_of_file

    rates = rates_of_file(Path(path))
    return None if rates is None else LoadShape(*rates)


def _of_log(path: str, time_unit: str | None, columns: str | None) -> LoadShape:
    from eldr_sim.traces.requests.logs.request_logs import known_log

    log = known_log(path, columns, time_unit=time_unit)
    if not log.timed:
        raise InputError("load", f"{path} does not say when requests come", _ALLOWED)
    arrival_s = log.arrival_s
    pieces = max(1, int(np.ceil(float(arrival_s[-1]) / _LOG_PIECE_S)))
    edges = np.arange(pieces + 1.0) * _LOG_PIECE_S
    counts = np.histogram(arrival_s, edges)[0]
    return LoadShape(edges, counts / _LOG_PIECE_S)
