"""Centroids that follow what is served: the online refit of ELDR's authors (casys-kaist/ELDR):
signatures of the last seconds are clustered, and each new centroid goes to the worker whose
centroid it is like."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.policies.eldr.clustering import Recent, add_columns, multiply, refit, take_away
from eldr_sim.policies.eldr.signature import Method

#: Signatures that are remembered beyond the window, because they may come again.
_REMEMBERED = 2048


class OnlineCentroids:
    """Centroids, refitted to the signatures of a window that ends at the refit.

    The first refit comes one window (``window_s``) after the first signature, the others
    ``every_s``; of several due at once the last is made. A refit needs as many signatures as
    centroids."""

    def __init__(
        self, centroids: Floats, every_s: float, window_s: float, method: Method, rounds: int
    ) -> None:
        self.centroids = centroids.astype(np.float32)  # exact, as all unit rows
        self._every_s, self._window_s = every_s, window_s
        self._method: Method = method
        self._rounds = rounds
        self._due_s = np.inf
        # When, the row of the signature, and its products with the centroids of now.
        self._times, self._rows = np.zeros(64), np.zeros(64, np.int64)
        self._similar, self._n_recent = np.zeros((64, len(centroids))), 0
        self._summed = np.full(64, -1)
        # Dot products of all rows are kept: signatures stay in the window for several refits, and
        # those of a trace come again.
        self._points = np.zeros((0, centroids.shape[1]), np.float32)
        self._between, self._sums = np.zeros((0, 0)), np.zeros((len(centroids), 0))
        self._n = self._n_between = 0
        self._row_of: dict[int, int] = {}

    def signature(
        self, number: int | None, make: Callable[[], Floats]
    ) -> tuple[int, NDArray[np.float32]]:
        """Return the row, good until the next call, and the unit vector of a signature, which
        ``make`` gives if ``number`` (`RequestInfo.signature_id`) is unknown."""
        row = None if number is None else self._row_of.get(number)
        if row is None:
            if self._n == len(self._points):
                self._make_room()
            row = self._n
            self._points[row] = make()
            self._n += 1
            if number is not None:
                self._row_of[number] = row
        return row, self._points[row]

    def note(self, row: int, similar: Floats, now_s: float) -> None:
        """Take note that the signature of a row is routed now, so ``similar [K]`` to them all."""
        if self._due_s == np.inf:
            self._due_s = now_s + self._window_s
        n = self._n_recent
        if n == len(self._times):
            self._times, self._rows = np.resize(self._times, 2 * n), np.resize(self._rows, 2 * n)
            self._similar = np.resize(self._similar, (2 * n, len(similar)))
            self._summed = np.resize(self._summed, 2 * n)
        self._times[n], self._rows[n], self._similar[n] = now_s, row, similar
        self._summed[n] = -1
        self._n_recent = n + 1

    def advance(self, now_s: float) -> None:
        """Refit if it is time."""
        if now_s < self._due_s:
            return
        at_s = self._due_s + (now_s - self._due_s) // self._every_s * self._every_s
        self._due_s = at_s + self._every_s
        gone = int(np.searchsorted(self._times[: self._n_recent], at_s - self._window_s, "right"))
        take_away(self._between, self._sums, self._recent(gone), gone)
        n = self._n_recent - gone
        for kept in self._times, self._rows, self._similar, self._summed:
            kept[:n] = kept[gone : gone + n].copy()
        self._n_recent = n
        if n < len(self.centroids):
            return
        recent, done = self._recent(n), self._n_between
        multiply(self._points, done, self._n, self._between)
        add_columns(self._between, self._sums, recent, done, self._n)
        self._n_between = self._n
        how = self.centroids, self._method, self._rounds
        moved, self._similar[:n] = refit(self._points, self._between, self._sums, recent, how)
        self.centroids = moved.astype(np.float32)

    def _recent(self, n: int) -> Recent:
        return Recent(self._rows[:n], self._similar[:n], self._summed[:n])

    def _make_room(self) -> None:
        """Keep only the rows in the window if there are many others, and double the room if not."""
        kept: Ints = np.arange(self._n)
        if self._n >= _REMEMBERED:
            kept = np.unique(self._rows[: self._n_recent])
        room = max(256, 2 * len(kept))
        done = kept[kept < self._n_between]
        points = np.zeros((room, self._points.shape[1]), np.float32)
        between, sums = np.zeros((room, room)), np.zeros((len(self._sums), room))
        points[: len(kept)] = self._points[kept]
        between[: len(done), : len(done)] = self._between[np.ix_(done, done)]
        sums[:, : len(done)] = self._sums[:, done]
        new_row = dict(zip(kept.tolist(), range(len(kept)), strict=True))
        recent = self._rows[: self._n_recent]
        recent[:] = np.searchsorted(kept, recent)
        self._row_of = {
            number: new_row[row] for number, row in self._row_of.items() if row in new_row
        }
        self._points, self._between, self._sums = points, between, sums
        self._n, self._n_between = len(kept), len(done)
