"""Order of the training samples: the permutation of the published data set, applied in bounded memory.

The published set was shuffled as a matrix of all samples with NumPy's legacy generator. The same generator puts a
list of sample numbers into the same order; only this list is kept in memory, 8 bytes per sample. Then each *piece*, a
range of old rows, is written in the order of the new rows, and each *bucket*, a range of new rows, collects its rows
from all pieces. Pieces are independent of one another, and so are buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.atomic import written
from common.data.stages import Record
from common.errors import DataError
from common.recommendation.criteo.preparation.days import Samples
from common.recommendation.criteo.sample_rows import CATEGORICAL, IDS, WORD

SEED = 0
WORDS = IDS + CATEGORICAL
"""Words of a sample with one id per feature."""
BYTES_PER_ROW = 3 * WORDS * WORD + 16
"""Memory per row of a piece or bucket: the row, a sorted copy, and the converted block."""
_BLOCK = 1 << 26


def shuffled(samples: int) -> NDArray[np.uint32]:
    """Return the old number of the sample at each new position.

    Raises:
        ValueError: too many samples for 32 bits.
    """
    if samples >= 2**32:
        raise ValueError(f"{samples:,} samples have no numbers of 32 bits")
    order = np.arange(samples, dtype=np.uint32)
    np.random.RandomState(SEED).shuffle(order)
    return order


def write_positions(path: Path, samples: int) -> Record:
    """Write the new position of each old sample, uint32 without a header."""
    order = shuffled(samples)
    positions = np.empty(samples, np.uint32)
    for first in range(0, samples, _BLOCK):
        last = min(first + _BLOCK, samples)
        positions[order[first:last]] = np.arange(first, last, dtype=np.uint32)
    with written(path) as partial, open(partial, "wb") as file:
        positions.tofile(file)
    return {"samples": samples}


def write_piece(samples: Samples, positions: Path, first: int, last: int, path: Path) -> Record:
    """Write old rows ``first`` to ``last`` in the order of their new positions, and the positions to a second file.

    Raises:
        DataError: a file is shorter than it was.
    """
    own = np.fromfile(positions, np.uint32, last - first, offset=first * WORD)
    order = np.argsort(own)
    rows = samples.rows(first, last)
    with written(path) as partial, open(partial, "wb") as file:
        rows[order].tofile(file)
    with written(_positions_path(path)) as partial, open(partial, "wb") as file:
        own[order].tofile(file)
    return {"rows": last - first}


def read_bucket(pieces: Sequence[Path], first: int, last: int) -> NDArray[np.int32]:
    """Collect new rows ``first`` to ``last`` from all pieces, (last - first, 40).

    Raises:
        DataError: the pieces do not have all of these rows.
    """
    rows = np.empty((last - first, WORDS), np.int32)
    found = 0
    for path in pieces:
        positions = np.memmap(_positions_path(path), np.uint32, "r")
        low, high = (int(position) for position in np.searchsorted(positions, np.array([first, last], np.uint32)))
        if low == high:
            continue
        block = np.fromfile(path, np.int32, (high - low) * WORDS, offset=low * WORDS * WORD)
        rows[positions[low:high].astype(np.int64) - first] = block.reshape(-1, WORDS)
        found += high - low
    if found != len(rows):
        raise DataError(f"{pieces[0].parent} has {found} of {len(rows)} rows; prepare into an empty folder")
    return rows


def _positions_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.places")
