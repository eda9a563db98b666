"""Flat columns of pieces of different lengths, which lie back to back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 16_384


def starts_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each piece begins when pieces of ``lengths`` lie back to back."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def bounds_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each piece begins, and where the last one ends."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def take(lengths: NDArray[np.int32], rows: NDArray[np.integer], *columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """The pieces ``rows`` of each flat column, whose pieces have ``lengths``; indices for a block of rows at a time."""
    starts, chosen = starts_of(lengths), lengths[rows].astype(np.int64)
    taken = tuple(np.empty(chosen.sum(), column.dtype) for column in columns)
    done = 0
    for block in range(0, len(rows), _BLOCK):
        sizes = chosen[block : block + _BLOCK]
        shift = starts[rows[block : block + _BLOCK]] - starts_of(sizes)
        total = int(sizes.sum())
        indices = np.arange(total) + np.repeat(shift, sizes)
        for column, target in zip(columns, taken, strict=True):
            target[done : done + total] = column[indices]
        done += total
    return taken
