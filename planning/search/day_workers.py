"""The number of workers over a day: what a fleet of a plan had ready, period by period."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_PERIODS = 24  #: most periods of a day
_MINUTE_S = 60.0


def workers_by_period(scaling: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the load and the ready workers of a run by period of the day.

    ``scaling``: of its summary. Each row has ``from_s``, ``to_s``, ``requests_per_s`` and
    ``workers``, the mean number that was ready by pool. Periods are minutes, at most 24 of them."""
    minutes = scaling["by_minute"]
    if not minutes:
        return []
    end = max(row["from_s"] for row in minutes) + _MINUTE_S
    length = _MINUTE_S * math.ceil(end / _MINUTE_S / _PERIODS)
    rows = []
    for n in range(math.ceil(end / length)):
        begin, until = n * length, min((n + 1) * length, end)
        arrived = sum(row["requests"] for row in minutes if begin <= row["from_s"] < until)
        workers = {
            pool: _mean(table["at_s"], table["ready"], begin, until)
            if table["at_s"]
            else scaling["mean_workers"][pool]  # never changes
            for pool, table in scaling["replicas"].items()
        }
        rows.append(
            {
                "from_s": begin,
                "to_s": until,
                "requests_per_s": arrived / (until - begin),
                "workers": workers,
            }
        )
    return rows


def _mean(at_s: list[float], count: list[float], begin: float, until: float) -> float:
    """Return the mean over a period of a count that changes at given times."""

    def at(time: float) -> float:
        return float(count[max(bisect_right(at_s, time) - 1, 0)])

    inside = [begin, *(time for time in at_s if begin < time < until), until]
    return math.fsum(at(a) * (b - a) for a, b in pairwise(inside)) / (until - begin)
