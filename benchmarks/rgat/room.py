"""How much room blocks need, by what some of them have filled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.rgat.block import BlockShape


class Filled:
    """Sums over the counts of blocks, from which the room of others follows.

    Args:
        bounds: what no block exceeds; its seeds are those of a batch.

    Attributes:
        sums: float64, [2 x counts + 1], on the CPU: sums of the counts, of their squares, and the number of blocks; may
            be added up over ranks.
    """

    def __init__(self, bounds: BlockShape) -> None:
        self._bounds = bounds
        self.sums = torch.zeros(2 * bounds.counts + 1, dtype=torch.float64)

    def add(self, counts: Tensor) -> None:
        """Add the ``counts`` of a block that lacks nothing."""
        values = counts.to(self.sums)
        self.sums += torch.cat([values, values.square(), values.new_ones(1)])

    def shape(self, sigma: float) -> BlockShape:
        """Room for the mean and ``sigma`` standard deviations of each count, at least for one where any can be.

        It doesn't exceed the bounds, and rises with the hops.
        """
        size, blocks = self._bounds.counts, float(self.sums[-1])
        mean = self.sums[:size] / blocks
        deviation = (self.sums[size:-1] / blocks - mean.square()).clamp_(min=0).sqrt()
        wanted = [math.ceil(value) for value in (mean + sigma * deviation).tolist()[:-1]]
        return _shape(wanted, self._bounds)

    def mean(self) -> Tensor:
        """[counts]: of the blocks, float64."""
        return self.sums[: self._bounds.counts] / self.sums[-1]


def at_most(bounds: BlockShape, limit: int) -> BlockShape:
    """``bounds`` with no entry but the seeds above ``limit``."""
    return _shape([min(value, limit) for value in _flat(bounds)], bounds)


def grown(shape: BlockShape, bounds: BlockShape) -> BlockShape:
    """Twice the room of ``shape``, within ``bounds``."""
    return _shape([2 * value for value in _flat(shape)], bounds)


def _flat(shape: BlockShape) -> list[int]:
    return [value for table in (shape.nodes, shape.edges, shape.rows) for line in table for value in line]


def _shape(wanted: Iterable[int], bounds: BlockShape) -> BlockShape:
    """A shape of the numbers ``wanted``, in the order of a block's counts, within ``bounds``; all seeds have room."""
    values, tables = iter(wanted), []
    for most in (bounds.nodes, bounds.edges, bounds.rows):
        lines = [[min(bound, max(next(values), 1)) for bound in hop] for hop in most]
        if most is bounds.nodes:
            lines[0] = list(bounds.nodes[0])
        columns = [accumulate(column, max) for column in zip(*lines, strict=True)]
        tables.append(tuple(zip(*columns, strict=True)))
    return BlockShape(bounds.schema, *tables)
