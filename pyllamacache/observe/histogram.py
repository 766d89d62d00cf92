"""Durations counted by size: one writer adds, anybody may have the frozen value."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

SECONDS_BOUNDS = (
    0.0001, 0.00025, 0.0005,
    0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05,
    0.1, 0.25, 0.5,
    1.0, 2.5, 5.0,
    10.0, 25.0, 50.0,
    100.0,
)  # fmt: skip
"""Upper ends of the buckets of every histogram here, in seconds, inclusive as Prometheus has them. They do not change,
so that what was collected before a restart adds up with what comes after it."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many durations fell into each bucket, and their sum."""

    bounds: tuple[float, ...] = SECONDS_BOUNDS
    """Ascending, inclusive upper ends in seconds; beyond the last there is one more bucket."""
    counts: tuple[int, ...] = (0,) * (len(SECONDS_BOUNDS) + 1)
    """Of each bucket alone; one more than `bounds`."""
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """0 where nothing was counted."""
        return self.sum_s / self.count if self.count else 0.0


class Recorder:
    """The mutable side. A negative duration, which a clock that was set back can give, counts as 0."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self._sum_s += seconds

    def value(self) -> Histogram:
        return Histogram(SECONDS_BOUNDS, tuple(self._counts), self._sum_s)
