"""Flat arrays that store pieces of different lengths one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 16_384


def starts_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the start offset of each piece when pieces of ``lengths`` are stored one after another."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def bounds_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the start offset of each piece, followed by the end of the last one."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def take(lengths: NDArray[np.integer], rows: NDArray[np.integer], *columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the pieces ``rows`` of each flat column; ``lengths`` are the lengths of all pieces of a column."""
    starts, chosen = starts_of(lengths), lengths[rows].astype(np.int64)
    taken = tuple(np.empty(chosen.sum(), column.dtype) for column in columns)
    done = 0
    for block in range(0, len(rows), _BLOCK):  # limits the memory for indices
        sizes = chosen[block : block + _BLOCK]
        shift = starts[rows[block : block + _BLOCK]] - starts_of(sizes)
        total = int(sizes.sum())
        indices = np.arange(total) + np.repeat(shift, sizes)
        for column, target in zip(columns, taken, strict=True):
            target[done : done + total] = column[indices]
        done += total
    return taken
