"""How much of an iteration something ran, and how much of its communication nothing else ran beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """A kernel, microseconds of any clock.

    Attributes:
        start, end: when it ran.
        communication: whether it moves data between ranks.
    """

    start: float
    end: float
    communication: bool


def busy_us(spans: Iterable[Span]) -> float:
    """Microseconds in which any kernel ran."""
    return _length(_union(list(spans)))


def exposed_us(spans: Iterable[Span]) -> float:
    """Microseconds in which communication ran and no other kernel did."""
    every = list(spans)
    return _length(_union(every)) - _length(_union([span for span in every if not span.communication]))


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The same time in intervals that do not touch, in order."""
    joined: list[tuple[float, float]] = []
    for start, end, _ in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
