"""Long series of figures made short enough to draw, without hiding their extremes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS = 400


@dataclass(frozen=True)
class Envelope:
    """A curve in bins: what was lowest, the mean and what was highest in each; all 1-D and of one length."""

    x: Floats
    low: Floats
    mean: Floats
    high: Floats

    @property
    def binned(self) -> bool:
        """Whether a bin holds more than one point."""
        return bool(np.any(self.low < self.high))


def envelope(x: Floats, y: Floats, bins: int = BINS) -> Envelope:
    """The curve y(x) in at most ``bins`` bins of equal width in x; points that are not finite are left out.

    Args:
        x: positions, 1-D, in any order.
        y: values, one for each.
        bins: the most that are wanted.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= bins:
        order = np.argsort(x, kind="stable")
        return Envelope(x[order], y[order], y[order], y[order])
    span = float(x.max() - x.min()) or 1.0
    place = np.minimum(((x - x.min()) / span * bins).astype(np.int64), bins - 1)
    order = np.argsort(place, kind="stable")
    _, first, count = np.unique(place[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(np.stack([x[order], y[order]]), first, axis=1)
    return Envelope(
        x=sums[0] / count,
        low=np.minimum.reduceat(y[order], first),
        mean=sums[1] / count,
        high=np.maximum.reduceat(y[order], first),
    )


def rate(seconds: Floats, samples: Floats, start: float, stop: float, bins: int) -> tuple[Floats, Floats]:
    """Samples a second in ``bins`` equal parts of the time from ``start`` to ``stop``, pauses included.

    The mean of the parts is the samples of the whole divided by its time: nothing is lost between them.

    Args:
        seconds: when each step was done, increasing.
        samples: training samples done by then; the first step did as many as the second.
        start, stop: in seconds.
        bins: number of parts.

    Returns:
        Middle of each part in seconds, and its rate; both empty for fewer than two steps or no time.
    """
    if len(seconds) < 2 or stop <= start:
        return np.empty(0), np.empty(0)
    before = samples[0] - (samples[1] - samples[0])
    edges = np.linspace(start, stop, bins + 1)
    done = np.interp(edges, np.concatenate([[start], seconds]), np.concatenate([[before], samples]))
    return (edges[:-1] + edges[1:]) / 2, np.diff(done) / np.diff(edges)


def mean_over_time(seconds: Floats, values: Floats, start: float, stop: float, bins: int) -> tuple[Floats, Floats]:
    """Mean of the finite ``values`` in ``bins`` equal parts of the time; parts without one are left out."""
    known = np.isfinite(values) & (seconds >= start) & (seconds <= stop)
    if not known.any() or stop <= start:
        return np.empty(0), np.empty(0)
    place = np.minimum(((seconds[known] - start) / (stop - start) * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    sums = np.bincount(place, weights=values[known], minlength=bins)
    filled = count > 0
    middle = start + (np.arange(bins) + 0.5) * (stop - start) / bins
    return middle[filled], sums[filled] / count[filled]


@dataclass(frozen=True)
class StepTimes:
    """How long steps took, in milliseconds: percentiles, mean, and how many were measured."""

    p1: float
    p25: float
    p50: float
    p75: float
    p99: float
    mean: float
    longest: float
    steps: int


def step_times(milliseconds: Floats) -> StepTimes | None:
    """The distribution of measured steps; None if none was. The first step of a block is not measured and is 0."""
    measured = milliseconds[np.isfinite(milliseconds) & (milliseconds > 0)]
    if not len(measured):
        return None
    p1, p25, p50, p75, p99 = (float(value) for value in np.percentile(measured, [1, 25, 50, 75, 99]))
    return StepTimes(p1, p25, p50, p75, p99, float(measured.mean()), float(measured.max()), len(measured))
