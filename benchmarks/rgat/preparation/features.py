"""Write features in the order of the permutation, in bounded memory.

First, each *piece* of the file is converted and sorted by new row number (:func:`write_piece`). Then each *bucket*, a
range of new rows, collects its rows from all pieces and is written to its final position (:func:`write_bucket`). Both
read and write runs that are as long as the memory allows. Pieces, and buckets, are independent of one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rgat.preparation import permutation
from benchmarks.rgat.prepared import FEATURE_DTYPES
from benchmarks.rgat.raw import RawArray
from common.data.atomic import written
from common.data.row_output import RowOutput
from common.data.stages import Record
from common.errors import DataError

BLOCK_BYTES = 16 << 20
"""Bytes that are read at once, if the memory allows."""
ROW_EXTRA = 32
"""Bytes of memory per row in addition to its features: positions and row numbers."""


def converted(values: NDArray[np.float32], kind: str) -> NDArray[np.generic]:
    """Return ``values`` in a dtype of ``FEATURE_DTYPES``; out-of-range numbers become the largest finite ones."""
    dtype, stored = FEATURE_DTYPES[kind]
    if dtype == torch.float32:
        return values
    largest = torch.finfo(dtype).max
    made = torch.from_numpy(values).clamp_(-largest, largest).to(dtype)
    bits: NDArray[np.generic] = made.view(torch.uint8).numpy() if dtype.itemsize == 1 else made.numpy()
    return bits.view(np.dtype(stored))


def write_piece(
    source: RawArray, permutations: Path, node_type: str, first: int, last: int, kind: str, memory: int, path: Path
) -> Record:
    """Convert rows ``first`` to ``last`` (exclusive), and write them and their new numbers, sorted by number.

    Args:
        permutations: folder of the permutations.
        kind: dtype of the features, a name in ``FEATURE_DTYPES``.
        memory: upper bound of the size of a block that is read, in bytes.
        path: output file; the numbers are in a file beside it.

    Raises:
        DataError: a feature is not finite.
    """
    numbers = np.array(permutation.load(permutations, node_type)[first:last])
    order = np.argsort(numbers)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    rows = np.empty((last - first, source.width), FEATURE_DTYPES[kind][1])
    step = max(1, min(BLOCK_BYTES, memory) // source.row_bytes)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        block = source.read(begin, end)
        _require_finite(source, begin, block)
        rows[place[begin - first : end - first]] = converted(block, kind)
    with written(path) as partial, open(partial, "wb") as file:
        file.write(rows.data)
    with written(_numbers(path)) as partial, open(partial, "wb") as file:
        np.save(file, numbers[order])
    return {"rows": last - first}


def write_bucket(pieces: Sequence[Path], first: int, last: int, memory: int, target: RowOutput) -> Record:
    """Write new rows ``first`` to ``last`` (exclusive) from the pieces.

    Raises:
        DataError: the pieces lack one of these rows.
    """
    rows = np.empty((last - first, target.shape[1]), target.dtype)
    step = max(1, min(BLOCK_BYTES, memory) // target.row_bytes)
    found = 0
    for path in pieces:
        numbers = np.load(_numbers(path), mmap_mode="r")
        low, high = (int(place) for place in np.searchsorted(numbers, [first, last]))
        for begin in range(low, high, step):
            count = min(step, high - begin)
            block = np.fromfile(path, target.dtype, count * target.shape[1], offset=begin * target.row_bytes)
            rows[numbers[begin : begin + count] - first] = block.reshape(count, -1)
            found += count
    if found != len(rows):
        raise DataError(f"{pieces[0].parent} has {found} of {len(rows)} rows; prepare into an empty folder")
    target.write(first, rows)
    return {"rows": found}


def _require_finite(source: RawArray, first: int, block: NDArray[np.float32]) -> None:
    low, high = torch.aminmax(torch.from_numpy(block))
    if torch.isfinite(low) and torch.isfinite(high):
        return
    row, column = np.argwhere(~np.isfinite(block))[0]
    raise DataError(f"{source.path}: row {first + row:,} has the feature {block[row, column]} at {column}")


def _numbers(path: Path) -> Path:
    return path.with_name(f"{path.name}.numbers.npy")
