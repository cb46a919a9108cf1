"""Medians with their spread, and percentiles, as NumPy's linear ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lite_runner.records import dataclass


@dataclass(frozen=True)
class Spread:
    """Repetitions of one figure, in its unit."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    values: tuple[float, ...]  # in the order in which they were measured

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        median, q1, q3 = (percentile(values, percent) for percent in (50, 25, 75))
        return cls(median, q1, q3, min(values), max(values), tuple(values))

    @property
    def half_range(self) -> float:
        """Half of what lies between the least and the largest."""
        return (self.max - self.min) / 2

    def overlaps(self, other: Spread) -> bool:
        """Whether a value of the one could be one of the other: the ranges share a point."""
        return self.min <= other.max and other.min <= self.max


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, between two values by their distance."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def number(value: float) -> str:
    """A figure as tables show it: 2957, 71.7, 4.72."""
    digits = 0 if abs(value) >= 200 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
