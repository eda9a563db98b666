"""Capacities of batches: one CUDA graph serves all batches of one shape, whose rest is padding.

All micro-batches of a global batch have the shape that holds the largest of them, so every rank has the same shape, and
an iteration that accumulates has one. The shapes follow from the counts of the structures alone: global batches in
random order are divided into micro-batches as in training, and the shapes are quantiles of their largest sums.

Axes: S samples, B global batches, C counts (:data:`benchmarks.oc20.samples.COUNTS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.oc20.samples import ATOMS, EDGES
from common.data.balanced_order import BalancedStream
from common.data.order import MicroBatches

BALANCED = EDGES
"""The count that is about equal in all micro-batches of a global batch."""
GLOBAL_BATCHES = 64
"""Number of global batches that the shapes are derived from."""
QUANTILES = (0.25, 0.5, 0.75, 0.95)
"""Shares of the global batches that fit the shapes but the last."""
MULTIPLE = 16
"""Capacities are multiples of this, so that Triton compiles each kernel once for all shapes."""


@dataclass(frozen=True, order=True)
class GraphShape:
    """Capacities of a batch, with the padding."""

    atoms: int
    edges: int

    @classmethod
    def of(cls, totals: Sequence[int]) -> GraphShape:
        """Return the smallest shape for these total counts, and an atom and an edge of padding."""
        return cls(*(-(-(int(totals[count]) + 1) // MULTIPLE) * MULTIPLE for count in (ATOMS, EDGES)))

    def holds(self, totals: Sequence[int]) -> bool:
        """Return whether structures with these total counts fit, and an atom and an edge of padding."""
        return totals[ATOMS] < self.atoms and totals[EDGES] < self.edges

    def times(self, factor: int) -> GraphShape:
        """Return a shape ``factor`` times as large."""
        return GraphShape(factor * self.atoms, factor * self.edges)


def largest_sums(counts_SC: NDArray[np.int32], micro_batches: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the largest sum of each count over the samples of a micro-batch, (C,); none may be empty."""
    firsts = np.cumsum([0, *map(len, micro_batches[:-1])])
    samples = np.concatenate([np.asarray(each) for each in micro_batches])
    sums: NDArray[np.int64] = np.add.reduceat(counts_SC[samples], firsts, 0, dtype=np.int64)
    return sums.max(0)


def train_shapes(counts_SC: NDArray[np.int32], micro_batch: int, streams: int) -> list[GraphShape]:
    """Return the shapes of the training's batches, in ascending order.

    The last one is as far above the largest of the global batches as their median is below, so that hardly any global
    batch of the training exceeds it. :func:`fitting` has a larger shape for that one.

    Args:
        micro_batch: samples per micro-batch, on average.
        streams: micro-batches per global batch, over all ranks.
    """
    stream = BalancedStream(counts_SC[:, BALANCED], MicroBatches(micro_batch, streams), seed=0, key_of=str)
    sums_BC = np.stack([largest_sums(counts_SC, stream.global_batch(step)) for step in range(GLOBAL_BATCHES)])
    totals = [*np.quantile(sums_BC, QUANTILES, 0), 2 * sums_BC.max(0) - np.median(sums_BC, 0)]
    return sorted({GraphShape.of(np.ceil(each).astype(np.int64)) for each in totals})


def fitting(shapes: Sequence[GraphShape], totals: Sequence[int]) -> GraphShape:
    """Return the first shape that holds these total counts, or else the smallest multiple of the last one that does."""
    for shape in shapes:
        if shape.holds(totals):
            return shape
    factor = 2
    while not shapes[-1].times(factor).holds(totals):
        factor += 1
    return shapes[-1].times(factor)
