"""Intermediate HDF5 files of fixed size: one sequence per row, padded with zeros.

Datasets, for N sequences of at most L tokens and M masked tokens: ``input_ids`` int16 [N, L], ``input_mask`` int8
[N, L], ``segment_ids`` int8 [N, L], ``masked_lm_positions`` int16 [N, M], ``masked_lm_ids`` int16 [N, M],
``next_sentence_labels`` int8 [N]. Entries with masked position 0 are padding, because position 0 is ``[CLS]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.bert.preparation.hdf5_file import opened, written
from benchmarks.bert.sequences import Sequences
from common.errors import DataError

COLUMNS = {
    "input_ids": np.int16,
    "input_mask": np.int8,
    "segment_ids": np.int8,
    "masked_lm_positions": np.int16,
    "masked_lm_ids": np.int16,
    "next_sentence_labels": np.int8,
}
ROWS = 8192
"""Number of rows per read or write."""


def write(path: Path, sequences: Sequences, max_sequence_length: int, max_masked: int) -> None:
    """Write ``sequences``; the file appears at ``path`` when it is complete."""
    total = len(sequences)
    with written(path) as file:
        for name, dtype in COLUMNS.items():
            width = max_masked if name.startswith("masked_lm") else max_sequence_length
            file.create_dataset(name, (total,) if name == "next_sentence_labels" else (total, width), dtype)
        for start in range(0, total, ROWS):
            rows = slice(start, min(start + ROWS, total))
            part = sequences.take(np.arange(rows.start, rows.stop))
            tokens, masked = (
                np.arange(width) < lengths[:, None]
                for width, lengths in ((max_sequence_length, part.lengths), (max_masked, part.masked_lengths))
            )
            file["input_ids"][rows] = _padded(part.input_ids, tokens)
            file["input_mask"][rows] = tokens
            file["segment_ids"][rows] = _padded(part.segment_ids, tokens)
            file["masked_lm_positions"][rows] = _padded(part.masked_lm_positions, masked)
            file["masked_lm_ids"][rows] = _padded(part.masked_lm_ids, masked)
            file["next_sentence_labels"][rows] = part.next_sentence_labels


def read(path: Path) -> Iterator[Sequences]:
    """Yield the sequences of ``path`` in pieces of at most ``ROWS``.

    Raises:
        DataError: the file is missing, damaged, or has another format.
    """
    with opened(path) as file:
        _check(path, file)
        for start in range(0, len(file["input_ids"]), ROWS):
            rows = slice(start, start + ROWS)
            tokens = file["input_mask"][rows] != 0
            positions = file["masked_lm_positions"][rows]
            masked = positions != 0
            yield Sequences(
                tokens.sum(axis=1, dtype=np.int32),
                file["input_ids"][rows][tokens],
                file["segment_ids"][rows][tokens],
                masked.sum(axis=1, dtype=np.int32),
                positions[masked],
                file["masked_lm_ids"][rows][masked],
                file["next_sentence_labels"][rows],
            )


def _padded(flat: NDArray[np.integer], present: NDArray[np.bool_]) -> NDArray[np.integer]:
    rows = np.zeros(present.shape, flat.dtype)
    rows[present] = flat
    return rows


def _check(path: Path, file: h5py.File) -> None:
    rows = {len(file[name]) if name in file else -1 for name in COLUMNS}
    if len(rows) != 1 or -1 in rows:
        raise DataError(f"{path} lacks one of the columns {', '.join(COLUMNS)}, or they differ in length")
