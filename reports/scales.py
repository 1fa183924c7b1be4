"""Linear scales: where the ticks of an axis lie, and how they read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps ``[low, high]`` of the data to ``[start, end]`` of the picture."""

    low: float
    high: float
    start: float
    end: float
    step: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values from ``low`` to ``high``."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return [index * self.step for index in range(first, last + 1)]

    def text(self, tick: float) -> str:
        """Return a tick's label, with as many decimals as the step needs."""
        decimals = max(0, -math.floor(math.log10(self.step) + 1e-9))
        if round(self.step * 10**decimals, 6) % 1:  # a step of 2.5 needs one more
            decimals += 1
        return f"{tick if abs(tick) > self.step / 2 else 0.0:,.{decimals}f}".replace("-", "−")


def linear(
    values: Iterable[float],
    start: float,
    end: float,
    *,
    zero: bool = False,
    n_ticks: int = 5,
    pad: bool = True,
) -> Scale:
    """Return a scale over the finite ones of some values.

    Parameters
    ----------
    values
        What must fit.
    start, end
        Places of the ends in the picture.
    zero
        Let the axis include 0.
    n_ticks
        About so many ticks.
    pad
        Widen the ends to a tick.
    """
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 else low - room), high + room
    step = _nice((high - low) / n_ticks)
    if pad:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, end, step)


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    for factor in (1.0, 2.0, 2.5, 5.0):
        if factor * power >= step * (1 - 1e-9):
            return factor * power
    return 10.0 * power
