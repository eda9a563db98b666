"""A clock that only moves when a test moves it; it takes the place of a module's ``time``."""

from __future__ import annotations


class Clock:
    """Shows ``now`` seconds; ``sleep`` moves it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter

    def time_ns(self) -> int:
        """The same time, in nanoseconds since a fixed date."""
        return round((1_700_000_000 + self.now) * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
