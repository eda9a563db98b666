"""HDF5 files of sequences: intermediate files of fixed size, and the files of variable length that training reads.

Fixed size: one sequence per row, padded with zeros. Datasets, for N sequences of at most L tokens and M masked tokens:
``input_ids`` int16 [N, L], ``input_mask`` int8 [N, L], ``segment_ids`` int8 [N, L], ``masked_lm_positions`` int16
[N, M], ``masked_lm_ids`` int16 [N, M], ``next_sentence_labels`` int8 [N]. Entries with masked position 0 are padding,
because position 0 is ``[CLS]``.

Variable length: every dataset has one entry per row, without padding. In unpacked files a row is one sequence:
``input_ids`` int16, ``segment_ids`` int8, ``masked_lm_positions`` int16 and ``masked_lm_ids`` int16 of variable length,
and ``next_sentence_labels`` int8 [N]. In packed files a row is one to three sequences back to back: the same four
datasets, with positions counted from the first token of the row, and also of variable length ``packed_input_len`` int16
(tokens of each sequence), ``packed_masked_lm_len`` int16 (masked tokens of each sequence) and ``next_sentence_labels``
int8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5s
from numpy.typing import NDArray

from benchmarks.bert.sequences import Sequences
from common.data import atomic
from common.data.ragged import starts_of
from common.errors import DataError

FIXED_COLUMNS = {
    "input_ids": np.int16,
    "input_mask": np.int8,
    "segment_ids": np.int8,
    "masked_lm_positions": np.int16,
    "masked_lm_ids": np.int16,
    "next_sentence_labels": np.int8,
}
FIXED_ROWS = 8192
"""Number of rows per read or write of a file of fixed size."""


@contextmanager
def written(path: Path) -> Iterator[h5py.File]:
    """Open a temporary file beside ``path``; flush it to disk and rename it if the block succeeds.

    If the block fails, the temporary file stays, and the next attempt overwrites it.
    """
    with atomic.written(path) as partial, h5py.File(partial, "w") as file:
        yield file


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open ``path`` for reading.

    Raises:
        DataError: the file is missing or not HDF5, or the block reads a damaged part.
    """
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is truncated or no HDF5 file of this kind ({error}); make it again") from error


def write_fixed(path: Path, sequences: Sequences, max_sequence_length: int, max_masked: int) -> None:
    """Write ``sequences``; the file appears at ``path`` when it is complete."""
    total = len(sequences)
    with written(path) as file:
        for name, dtype in FIXED_COLUMNS.items():
            width = max_masked if name.startswith("masked_lm") else max_sequence_length
            file.create_dataset(name, (total,) if name == "next_sentence_labels" else (total, width), dtype)
        for start in range(0, total, FIXED_ROWS):
            rows = slice(start, min(start + FIXED_ROWS, total))
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


def read_fixed(path: Path) -> Iterator[Sequences]:
    """Yield the sequences of ``path`` in pieces of at most ``FIXED_ROWS``.

    Raises:
        DataError: the file is missing, damaged, or has another format.
    """
    with opened(path) as file:
        _check_fixed(path, file)
        for start in range(0, len(file["input_ids"]), FIXED_ROWS):
            rows = slice(start, start + FIXED_ROWS)
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


def _check_fixed(path: Path, file: h5py.File) -> None:
    rows = {len(file[name]) if name in file else -1 for name in FIXED_COLUMNS}
    if len(rows) != 1 or -1 in rows:
        raise DataError(f"{path} lacks one of the columns {', '.join(FIXED_COLUMNS)}, or they differ in length")


def write_varlength(path: Path, sequences: Sequences) -> None:
    """Write one sequence per row; the file appears at ``path`` when it is complete."""
    with written(path) as file:
        _ragged(file, "input_ids", sequences.input_ids, sequences.lengths)
        _ragged(file, "segment_ids", sequences.segment_ids, sequences.lengths)
        _ragged(file, "masked_lm_positions", sequences.masked_lm_positions, sequences.masked_lengths)
        _ragged(file, "masked_lm_ids", sequences.masked_lm_ids, sequences.masked_lengths)
        file.create_dataset("next_sentence_labels", data=sequences.next_sentence_labels)


def write_packed(path: Path, sequences: Sequences, pack_sizes: NDArray[np.integer]) -> None:
    """Write packs; the file appears at ``path`` when it is complete.

    Args:
        sequences: sequences of the first pack, then of the second, and so on.
        pack_sizes: number of sequences in each pack; the sum is ``len(sequences)``.
    """
    firsts = starts_of(pack_sizes)
    tokens = np.add.reduceat(sequences.lengths, firsts) if len(firsts) else np.zeros(0, np.int32)
    masked = np.add.reduceat(sequences.masked_lengths, firsts) if len(firsts) else np.zeros(0, np.int32)
    shift = starts_of(sequences.lengths) - np.repeat(starts_of(tokens), pack_sizes)
    positions = sequences.masked_lm_positions + np.repeat(shift, sequences.masked_lengths)
    with written(path) as file:
        _ragged(file, "input_ids", sequences.input_ids, tokens)
        _ragged(file, "segment_ids", sequences.segment_ids, tokens)
        _ragged(file, "masked_lm_positions", positions.astype(np.int16), masked)
        _ragged(file, "masked_lm_ids", sequences.masked_lm_ids, masked)
        _ragged(file, "packed_input_len", sequences.lengths.astype(np.int16), pack_sizes)
        _ragged(file, "packed_masked_lm_len", sequences.masked_lengths.astype(np.int16), pack_sizes)
        _ragged(file, "next_sentence_labels", sequences.next_sentence_labels, pack_sizes)


def read_varlength(path: Path) -> Sequences:
    """Return all sequences of an unpacked file.

    Raises:
        DataError: the file is missing, damaged, or packed.
    """
    with opened(path) as file:
        if "packed_input_len" in file:
            raise DataError(f"{path} holds packs where single sequences are needed")
        input_ids, segment_ids, positions, labels = (
            file[name][:] for name in ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
        )
        next_sentence = file["next_sentence_labels"][:]
    return Sequences(
        _lengths(input_ids),
        _flat(input_ids, np.int16),
        _flat(segment_ids, np.int8),
        _lengths(positions),
        _flat(positions, np.int16),
        _flat(labels, np.int16),
        next_sentence.astype(np.int8),
    )


def pack_sizes_of(path: Path) -> NDArray[np.int64]:
    """Return the number of sequences in each pack of a packed file.

    Raises:
        DataError: the file is missing, damaged, or not packed.
    """
    with opened(path) as file:
        if "packed_input_len" not in file:
            raise DataError(f"{path} holds no packs: it lacks packed_input_len")
        return _lengths(file["packed_input_len"][:]).astype(np.int64)


def _ragged(file: h5py.File, name: str, flat: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
    rows = np.empty(len(lengths), object)
    start = 0
    for number, length in enumerate(lengths.tolist()):
        rows[number] = flat[start : start + length]
        start += length
    dataset = file.create_dataset(name, (len(rows),), dtype=h5py.vlen_dtype(flat.dtype))
    # Assignment through h5py fails if all rows have the same length, because it treats them as a matrix.
    dataset.id.write(h5s.ALL, h5s.ALL, rows)


def _lengths(rows: NDArray[np.object_]) -> NDArray[np.int32]:
    return np.fromiter((len(row) for row in rows), np.int32, len(rows))


def _flat(rows: NDArray[np.object_], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype)
