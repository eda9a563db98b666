"""Capacities of padded batches whose samples have several sizes, such as graphs of nodes and edges.

One CUDA graph serves all batches with the same capacities. The capacities follow from the sizes of the samples alone:
global batches in random order are divided into micro-batches as in training, and the capacities are quantiles of the
largest sums of sizes. All micro-batches of a global batch have capacities for the largest of them, so every rank has
the same ones, and an iteration that accumulates has one key.

Axes: P samples, B global batches, C sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.balanced_order import BalancedStream
from common.data.order import MicroBatches

Capacities = tuple[int, ...]
"""Largest sums of the sizes in a batch, with at least one unit of padding of each."""
GLOBAL_BATCHES = 64
"""Number of global batches that capacities are derived from."""
QUANTILES = (0.25, 0.5, 0.75, 0.95)
"""Shares of the global batches that fit all capacities but the last."""
MULTIPLE = 16
"""Capacities are multiples of this, so that Triton compiles a kernel once for all of them."""


def capacities_of(totals: Iterable[int]) -> Capacities:
    """Return the smallest capacities for these sums of sizes and the padding."""
    return tuple(-(-(int(total) + 1) // MULTIPLE) * MULTIPLE for total in totals)


def largest_sums(sizes_PC: NDArray[np.int32], micro_batches: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the largest sum of each size over the samples of a micro-batch, (C,); no micro-batch may be empty."""
    firsts = np.cumsum([0, *map(len, micro_batches[:-1])])
    samples = np.concatenate([np.asarray(each) for each in micro_batches])
    sums: NDArray[np.int64] = np.add.reduceat(sizes_PC[samples], firsts, 0, dtype=np.int64)
    return sums.max(0)


def train_capacities(
    sizes_PC: NDArray[np.int32], weight_P: NDArray[np.int32], micro_batch: int, streams: int
) -> list[Capacities]:
    """Return capacities for the training's batches, in ascending order.

    The last ones are as far above the largest of the global batches as their median is below, so that hardly any global
    batch of the training exceeds them. :func:`fitting` has larger ones for that batch.

    Args:
        weight_P: weights by which micro-batches are balanced (:class:`BalancedStream`).
        micro_batch: samples per micro-batch, on average.
        streams: micro-batches per global batch, over all ranks.
    """
    stream = BalancedStream(weight_P, MicroBatches(micro_batch, streams), seed=0, key_of=str)
    sums_BC = np.stack([largest_sums(sizes_PC, stream.global_batch(step)) for step in range(GLOBAL_BATCHES)])
    totals = [*np.quantile(sums_BC, QUANTILES, 0), 2 * sums_BC.max(0) - np.median(sums_BC, 0)]
    return sorted({capacities_of(np.ceil(each).tolist()) for each in totals})


def fitting(known: Sequence[Capacities], totals: Sequence[int]) -> Capacities:
    """Return the first capacities that hold sums of sizes, or else the smallest multiple of the last ones that does."""
    needed = capacities_of(totals)
    for each in known:
        if all(need <= capacity for need, capacity in zip(needed, each, strict=True)):
            return each
    factor = max(-(-need // capacity) for need, capacity in zip(needed, known[-1], strict=True))
    return tuple(factor * capacity for capacity in known[-1])
