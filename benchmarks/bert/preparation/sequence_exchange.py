"""Move sequences from text parts to shards, in bounded memory.

:func:`scatter` writes the sequences of one part to one file, grouped by shard. :func:`gather` then reads the group of
one shard from the files of all parts. Parts are independent of each other, and shards are too, so both steps can run in
parallel and continue after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.bert.sequences import Sequences, concatenate
from common.data import atomic
from common.data.ragged import bounds_of, starts_of
from common.errors import DataError

_COLUMNS = (np.int32, np.int32, np.int16, np.int8, np.int32, np.int16, np.int16, np.int8)


def scatter(pieces: Iterable[Sequences], slots: NDArray[np.int32], boundaries: NDArray[np.int64], path: Path) -> None:
    """Write the sequences of one part, grouped by shard; the file appears at ``path`` when it is complete.

    A group is ordered by position. The file stores the positions too, because :func:`gather` merges the parts by them.

    Args:
        slots: [N], position of each sequence in the whole set; -1 omits the sequence.
        boundaries: [shards + 1], first position of each shard, and the end of the last shard.
        path: output file. ``path`` plus ``.index.npy`` is its index: int64, the offsets of the groups in bytes
            [shards + 1], then their numbers of sequences, tokens and masked tokens [3, shards].

    Raises:
        DataError: ``pieces`` and ``slots`` differ in number.
    """
    sequences = concatenate(list(pieces))
    if len(sequences) != len(slots):
        raise DataError(f"{path.name}: {len(sequences)} sequences where {len(slots)} were counted; prepare afresh")
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    shard = np.searchsorted(boundaries, slots[order], side="right") - 1
    shards = len(boundaries) - 1
    rows = np.searchsorted(shard, np.arange(shards + 1))
    ordered = sequences.take(order)
    tokens, masked = (bounds_of(lengths)[rows] for lengths in (ordered.lengths, ordered.masked_lengths))
    bounds = (rows, rows, tokens, tokens, rows, masked, masked, rows)
    columns = (slots[order], *ordered.columns)
    offsets = np.zeros(shards + 1, np.int64)
    with atomic.written(path) as partial:
        with open(partial, "wb") as file:
            for number in range(shards):
                for column, dtype, bound in zip(columns, _COLUMNS, bounds, strict=True):
                    file.write(np.ascontiguousarray(column[bound[number] : bound[number + 1]], dtype).data)
                offsets[number + 1] = file.tell()
        atomic.save(_index(path), np.concatenate([offsets, np.diff(rows), np.diff(tokens), np.diff(masked)]))


def gather(paths: Sequence[Path], shard: int, shards: int) -> tuple[NDArray[np.int32], Sequences]:
    """Return the positions, ascending, and the sequences of one shard, from the files of all parts.

    Raises:
        DataError: the file of a part is missing or too short.
    """
    slots, pieces = [], []
    for path in paths:
        own, sequences = _read_group(path, shard, shards)
        slots.append(own)
        pieces.append(sequences)
    joined = np.concatenate(slots)
    order = np.argsort(joined)
    return joined[order], concatenate(pieces).take(order)


def _read_group(path: Path, shard: int, shards: int) -> tuple[NDArray[np.int32], Sequences]:
    try:
        index = np.load(_index(path), mmap_mode="r")
        offset, end = int(index[shard]), int(index[shard + 1])
        total, tokens, masked = (int(index[shards + 1 + kind * shards + shard]) for kind in range(3))
        with open(path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), end - offset, offset)
    except (FileNotFoundError, ValueError, IndexError) as error:
        raise DataError(f"{path} is missing or damaged ({error}); prepare into an empty folder") from error
    if len(data) != end - offset:
        raise DataError(f"{path} is truncated; prepare into an empty folder")
    lengths = (total, total, tokens, tokens, total, masked, masked, total)
    starts = starts_of(np.array([n * np.dtype(dtype).itemsize for n, dtype in zip(lengths, _COLUMNS, strict=True)]))
    slots, *columns = (
        np.frombuffer(data, dtype, n, int(start)) for n, dtype, start in zip(lengths, _COLUMNS, starts, strict=True)
    )
    return slots, Sequences(*columns)


def _index(path: Path) -> Path:
    return path.with_name(path.name + ".index.npy")
