"""How long kernels ran in an iteration, and how long communication ran without any other kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Time span of a kernel, in microseconds of any clock.

    Attributes:
        start, end: start and end time.
        communication: whether the kernel transfers data between ranks.
    """

    start: float
    end: float
    communication: bool


def busy_us(spans: Iterable[Span]) -> float:
    """Return the microseconds in which any kernel ran."""
    return _length(_union(list(spans)))


def exposed_us(spans: Iterable[Span]) -> float:
    """Return the microseconds in which only communication ran."""
    every = list(spans)
    return _length(_union(every)) - _length(_union([span for span in every if not span.communication]))


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Merge spans into disjoint intervals, in order."""
    joined: list[tuple[float, float]] = []
    for start, end, _ in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
