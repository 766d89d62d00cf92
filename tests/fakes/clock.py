"""Time that passes when a test says so."""

from __future__ import annotations


class FakeClock:
    """`clock()` is what `time.monotonic()` would be. `tick_s` passes with every reading."""

    def __init__(self, now_s: float = 1000.0, *, tick_s: float = 0.0) -> None:
        self.now_s = now_s
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
