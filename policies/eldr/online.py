"""Centroids that follow what is served: the online refit of ELDR's authors (casys-kaist/ELDR):
signatures of the last seconds are clustered, and each new centroid goes to the worker with the most
similar one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.jit import njit
from eldr_sim.policies.eldr.clustering import Recent, add_columns, multiply, refit, take_away
from eldr_sim.policies.eldr.signature import Method

#: Signatures that are remembered beyond the window, because they may come again.
_REMEMBERED = 2048


class Served(NamedTuple):
    """What is served, for compiled code: rows of signatures, and which came when."""

    points: NDArray[np.float32]  #: ``[rows, d]``: unit vectors
    centroids: NDArray[np.float32]  #: ``[K, d]``: of now
    due_s: Floats  #: ``[1]``: when they are refitted; infinite before the first request
    window_s: float
    n: Ints  #: ``[1]``: requests in the window, the first ones of
    times: Floats  #: ``[room]``: when they came,
    rows: Ints  #: ``[room]``: their signatures,
    similar: Floats  #: ``[room, K]``: the products with the centroids,
    summed: Ints  #: and `clustering.Recent.summed`


@njit()
def note(served: Served, row: int, now_s: float) -> None:
    """Take note that the signature of a row is routed now; how similar it is stands there."""
    n = served.n[0]
    if served.due_s[0] == np.inf:
        served.due_s[0] = now_s + served.window_s
    served.times[n], served.rows[n], served.summed[n] = now_s, row, -1
    served.n[0] = n + 1


class OnlineCentroids:
    """Centroids, refitted to the signatures of a window that ends at the refit.

    The first refit comes one window (``window_s``) after the first signature, the others
    ``every_s``; of several due at once the last is made. A refit needs as many signatures as
    centroids. ``served``: what may be decided on now, anew after each call."""

    def __init__(
        self, centroids: Floats, every_s: float, window_s: float, method: Method, rounds: int
    ) -> None:
        self._every_s, self._method, self._rounds = every_s, method, rounds
        k, d = centroids.shape
        self.served = Served(
            points=np.zeros((0, d), np.float32),
            centroids=centroids.astype(np.float32),  # exact, as all unit rows
            due_s=np.full(1, np.inf),
            window_s=window_s,
            n=np.zeros(1, np.int64),
            times=np.zeros(64),
            rows=np.zeros(64, np.int64),
            similar=np.zeros((64, k)),
            summed=np.full(64, -1),
        )
        # Dot products of all rows are kept: signatures stay in the window for several refits, and
        # those of a trace come again.
        self._between, self._sums = np.zeros((0, 0)), np.zeros((k, 0))
        self._n = self._n_between = 0
        self._row_of: dict[int, int] = {}

    def add(
        self, numbers: Sequence[int | None], make: Callable[[list[int]], Floats]
    ) -> tuple[Ints, Ints | None]:
        """Return the rows of some signatures, good until the next call, and where the others have
        moved: the new row of each old one, -1: forgotten; None: nowhere.

        ``numbers``: `RequestInfo.signature_id`; ``make``: gives the unit vectors of those with
        these indices that are unknown."""
        moved = None
        if self._n + len(numbers) > len(self.served.points):
            moved = self._make_room(len(numbers))
        rows = np.array([-1 if i is None else self._row_of.get(i, -1) for i in numbers])
        if len(new := np.flatnonzero(rows < 0)):
            begin, self._n = self._n, self._n + len(new)
            self.served.points[begin : self._n] = make(new.tolist())
            rows[new] = np.arange(begin, self._n)
            for i, row in zip(new.tolist(), rows[new].tolist(), strict=True):
                if (number := numbers[i]) is not None:
                    self._row_of[number] = row
        return rows, moved

    def advance(self, now_s: float) -> None:
        """Refit if it is time; let there be room to note another request."""
        served = self.served
        if int(served.n[0]) == len(served.times):
            more: dict[str, Any] = {
                name: np.resize(old := getattr(served, name), (2 * len(old), *old.shape[1:]))
                for name in ("times", "rows", "similar", "summed")
            }
            self.served = served = served._replace(**more)
        due_s = float(served.due_s[0])
        if now_s < due_s:
            return
        at_s = due_s + (now_s - due_s) // self._every_s * self._every_s
        served.due_s[0] = at_s + self._every_s
        begin = at_s - served.window_s
        gone = int(np.searchsorted(served.times[: int(served.n[0])], begin, "right"))
        take_away(self._between, self._sums, self._recent(gone), gone)
        n = int(served.n[0]) - gone
        for kept in served.times, served.rows, served.similar, served.summed:
            kept[:n] = kept[gone : gone + n].copy()
        served.n[0] = n
        if n < len(served.centroids):
            return
        recent, done = self._recent(n), self._n_between
        multiply(served.points, done, self._n, self._between)
        add_columns(self._between, self._sums, recent, done, self._n)
        self._n_between = self._n
        how = served.centroids, self._method, self._rounds
        moved, served.similar[:n] = refit(served.points, self._between, self._sums, recent, how)
        served.centroids[:] = moved

    def _recent(self, n: int) -> Recent:
        served = self.served
        return Recent(served.rows[:n], served.similar[:n], served.summed[:n])

    def _make_room(self, n: int) -> Ints:
        """Keep only the rows in the window if there are many others, and have room for ``n`` more
        and as many as there are; return the new row of each, -1: forgotten."""
        kept: Ints = np.arange(self._n)
        recent = self.served.rows[: int(self.served.n[0])]
        if self._n >= _REMEMBERED:
            kept = np.unique(recent)
        room = max(256, 2 * len(kept), len(kept) + n)
        done = kept[kept < self._n_between]
        points = np.zeros((room, self.served.points.shape[1]), np.float32)
        between, sums = np.zeros((room, room)), np.zeros((len(self._sums), room))
        points[: len(kept)] = self.served.points[kept]
        between[: len(done), : len(done)] = self._between[np.ix_(done, done)]
        sums[:, : len(done)] = self._sums[:, done]
        moved = np.full(self._n, -1)
        moved[kept] = np.arange(len(kept))
        recent[:] = moved[recent]
        self._row_of = {
            number: int(moved[row]) for number, row in self._row_of.items() if moved[row] >= 0
        }
        self.served = self.served._replace(points=points)
        self._between, self._sums = between, sums
        self._n, self._n_between = len(kept), len(done)
        return moved
