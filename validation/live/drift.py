"""Drift of a machine's speed, by a probe: the same small piece of work before every step.

Virtual machines do not compute at the same speed all the time: what others do on the same host
slows a core by up to a factor of two, for seconds or for minutes. Bursts before and after a run
cannot tell what happens between them, so the plug-in times one token in one MoE layer before each
step (:mod:`~.plugin`). How strongly the parts of a step follow the probe is fitted on the steps of
the calibration, as exponents: at equal composition, ``part ~ probe ** exponent``. Calibrated tables
hold times at the reference speed; a run is predicted with its own probes. Nothing that is judged is
used: the probe does the same work in every run.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

FloatArray = NDArray[np.float64]

_WINDOW = 3  # probes whose median is taken
_ALIKE = 4  # fewest steps of a point that tells how times follow the probe


class DriftModel(BaseModel):
    """How an engine's steps follow the probe; without drift all factors are 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference_s: float = Field(gt=0)  #: probe at the speed of the tables, s
    moe: float  #: exponent of the MoE layers
    attention: float  #: exponent of attention
    rest: float  #: exponent of the other parts
    step: float  #: exponent of whole steps


class Drift:
    """Speed of a core over time. ``at_s``, ``probe_s``: times of probes, ascending, and what they
    took; NaN are left out; ``reference_s``: what a probe takes at the reference speed; None takes
    the median."""

    def __init__(self, at_s: FloatArray, probe_s: FloatArray, reference_s: float | None) -> None:
        known = np.isfinite(probe_s)
        self.at_s = np.asarray(at_s, np.float64)[known]
        taken = np.asarray(probe_s, np.float64)[known]
        if len(taken):
            near = np.pad(taken, _WINDOW // 2, mode="edge")
            taken = np.median(np.lib.stride_tricks.sliding_window_view(near, _WINDOW), axis=1)
            reference_s = float(np.median(taken)) if reference_s is None else reference_s
        self.reference_s = reference_s
        self.factors = taken if reference_s is None or not len(taken) else taken / reference_s

    def factor(self, at_s: FloatArray) -> FloatArray:
        """Return by how much a probe takes longer at these times than at the reference speed."""
        if not len(self.at_s):
            return np.ones_like(at_s)
        return np.interp(at_s, self.at_s, self.factors)


class Clock:
    """A clock on which the machine always has the reference speed. ``at_s``, ``factors``: ascending
    times, and by how much steps take longer there; in between, the geometric mean of both ends.
    Outside, the time-weighted mean of all. None of them: the clock is the wall's."""

    def __init__(self, at_s: FloatArray, factors: FloatArray) -> None:
        self._wall = np.asarray(at_s, np.float64)
        self._own = self._wall.copy()
        self.mean = 1.0
        if len(self._wall) > 1:
            own = np.diff(self._wall) / np.sqrt(factors[:-1] * factors[1:])
            self.mean = float((self._wall[-1] - self._wall[0]) / own.sum())
            self._own = self._wall[0] / self.mean + np.concatenate([[0.0], np.cumsum(own)])

    def own_s(self, wall_s: FloatArray) -> FloatArray:
        """Return the time on this clock at moments of the wall's."""
        return self._convert(wall_s, self._wall, self._own, 1 / self.mean)

    def wall_s(self, own_s: FloatArray) -> FloatArray:
        """Return the wall's time at moments of this clock; the inverse of `own_s`."""
        return self._convert(own_s, self._own, self._wall, self.mean)

    @staticmethod
    def _convert(x: FloatArray, known: FloatArray, values: FloatArray, slope: float) -> FloatArray:
        x = np.asarray(x, np.float64)
        if len(known) < 2:
            return x
        inside = np.interp(x, known, values)
        before, after = slope * np.minimum(x - known[0], 0), slope * np.maximum(x - known[-1], 0)
        return np.asarray(inside + before + after, np.float64)


def exponent(groups: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Return the exponent with which times follow the probe, by least squares, 0 to 2. ``groups``:
    times and factors of equal steps. 0 where the probe did not change."""
    xy = xx = 0.0
    for seconds, factors in groups:
        if len(seconds) >= _ALIKE:
            x, y = np.log(factors), np.log(seconds)
            dx, dy = x - x.mean(), y - y.mean()
            xy, xx = xy + float(dx @ dy), xx + float(dx @ dx)
    return float(np.clip(xy / xx, 0.0, 2.0)) if xx > 0 else 0.0
