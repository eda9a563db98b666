"""Reduce long series of numbers to a size that can be drawn, without hiding their extremes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS = 400


@dataclass(frozen=True)
class Envelope:
    """A curve in bins, with the lowest, mean and highest value of each; all arrays are 1-D with one length."""

    x: Floats
    low: Floats
    mean: Floats
    high: Floats

    @property
    def binned(self) -> bool:
        """Whether a bin holds more than one point."""
        return bool(np.any(self.low < self.high))


def envelope(x: Floats, y: Floats, bins: int = BINS) -> Envelope:
    """Return the curve y(x) in at most ``bins`` bins of equal width in x. Points that are not finite are ignored.

    Args:
        x: positions, 1-D, in any order.
        y: values, 1-D, one per position.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= bins:
        order = np.argsort(x, kind="stable")
        return Envelope(x[order], y[order], y[order], y[order])
    span = float(x.max() - x.min()) or 1.0
    bin_index = np.minimum(((x - x.min()) / span * bins).astype(np.int64), bins - 1)
    order = np.argsort(bin_index, kind="stable")
    _, first, count = np.unique(bin_index[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(np.stack([x[order], y[order]]), first, axis=1)
    return Envelope(
        x=sums[0] / count,
        low=np.minimum.reduceat(y[order], first),
        mean=sums[1] / count,
        high=np.maximum.reduceat(y[order], first),
    )


def rate(seconds: Floats, samples: Floats, start: float, stop: float, bins: int) -> tuple[Floats, Floats]:
    """Return samples per second in ``bins`` equal parts of the time from ``start`` to ``stop``, including pauses.

    The mean over the parts is the total number of samples divided by the total time.

    Args:
        seconds: time at which each step ended, increasing.
        samples: total training samples at that time. The first step is assumed to be as large as the second.
        start, stop: seconds.

    Returns:
        the middle of each part in seconds, and its rate; both empty with fewer than two steps or no time.
    """
    if len(seconds) < 2 or stop <= start:
        return np.empty(0), np.empty(0)
    before = samples[0] - (samples[1] - samples[0])
    edges = np.linspace(start, stop, bins + 1)
    done = np.interp(edges, np.concatenate([[start], seconds]), np.concatenate([[before], samples]))
    return (edges[:-1] + edges[1:]) / 2, np.diff(done) / np.diff(edges)


def mean_over_time(seconds: Floats, values: Floats, start: float, stop: float, bins: int) -> tuple[Floats, Floats]:
    """Return middle and mean of the finite ``values`` in ``bins`` equal parts of ``start`` to ``stop``.

    Empty parts are skipped.
    """
    known = np.isfinite(values) & (seconds >= start) & (seconds <= stop)
    if not known.any() or stop <= start:
        return np.empty(0), np.empty(0)
    bin_index = np.minimum(((seconds[known] - start) / (stop - start) * bins).astype(np.int64), bins - 1)
    count = np.bincount(bin_index, minlength=bins)
    sums = np.bincount(bin_index, weights=values[known], minlength=bins)
    filled = count > 0
    middle = start + (np.arange(bins) + 0.5) * (stop - start) / bins
    return middle[filled], sums[filled] / count[filled]


@dataclass(frozen=True)
class StepTimes:
    """Distribution of step times in milliseconds: percentiles, mean, maximum, and number of measured steps."""

    p1: float
    p25: float
    p50: float
    p75: float
    p99: float
    mean: float
    longest: float
    steps: int


def step_times(milliseconds: Floats) -> StepTimes | None:
    """Return the distribution of the positive, finite step times; None if there are none."""
    # The time of the first step of a block is not measured and is 0.
    measured = milliseconds[np.isfinite(milliseconds) & (milliseconds > 0)]
    if not len(measured):
        return None
    p1, p25, p50, p75, p99 = (float(value) for value in np.percentile(measured, [1, 25, 50, 75, 99]))
    return StepTimes(p1, p25, p50, p75, p99, float(measured.mean()), float(measured.max()), len(measured))
