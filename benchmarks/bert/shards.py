"""Reader for one HDF5 file of prepared sequences, packed or unpacked.

:mod:`benchmarks.bert.preparation.hdf5` describes the formats, which are those of the MLPerf preparation. In
memory a shard is flat columns (:class:`Sequences`). Values are checked once, when they are read, so that taking rows
is fast.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.bert.sequences import Sequences, concatenate
from common.data.ragged import bounds_of, starts_of
from common.errors import DataError

SLICE_ROWS = 256
"""Rows per read, which take 3 ms. Larger reads would block the training thread for longer, through Python's GIL."""

_VERIFY = "check the data with 'mlperf-suite verify benchmark=bert --data-dir DATA'"
_RAGGED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_LENGTHS = ("packed_input_len", "packed_masked_lm_len")
_LABELS = "next_sentence_labels"


@dataclass(frozen=True)
class RowLimits:
    """Limits that every row is checked against.

    Attributes:
        packed: whether rows are packs instead of single sequences.
        max_length, max_sequences, max_masked: maximum numbers of tokens, sequences and masked tokens in a row.
        vocabulary: exclusive upper bound of token ids.
        segment_types: exclusive upper bound of segment ids.
    """

    packed: bool
    max_length: int
    max_sequences: int
    max_masked: int
    vocabulary: int
    segment_types: int


class SequenceShard:
    """Rows of sequences in memory, in the order of training.

    Args:
        sequences: sequences of all rows, in the order of the file.
        sequences_of_row: number of sequences in each row.
        order: indices of the rows in the order of training.
    """

    def __init__(self, sequences: Sequences, sequences_of_row: NDArray[np.integer], order: NDArray[np.integer]) -> None:
        self._sequences = sequences
        self._order = order
        self._row = bounds_of(sequences_of_row)
        self._token = bounds_of(sequences.lengths)[self._row]
        self._masked = bounds_of(sequences.masked_lengths)[self._row]

    def take(self, start: int, stop: int) -> Sequences:
        """Return the sequences of the rows ``order[start:stop]``."""
        rows = self._order[start:stop]
        of_sequences, of_tokens, of_masked = (
            [slice(first, last) for first, last in zip(bounds[rows].tolist(), bounds[rows + 1].tolist(), strict=True)]
            for bounds in (self._row, self._token, self._masked)
        )
        parts = (of_sequences, of_tokens, of_tokens, of_sequences, of_masked, of_masked, of_sequences)
        columns = zip(self._sequences.columns, parts, strict=True)
        return Sequences(*(np.concatenate([column[part] for part in own]) for column, own in columns))


class ShardFile:
    """Reader that loads one file in slices; a :class:`common.data.shard_streams.ShardReader`.

    Args:
        rows: number of rows that the file must have.
        order: maps the numbers of sequences in the rows to the order of training; None keeps the order of the file.
        part: first row to read, and one past the last; None reads all.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        limits: RowLimits,
        order: Callable[[NDArray[np.integer]], NDArray[np.integer]] | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.path = path
        self.rows_read = 0
        self._rows = rows
        self._limits = limits
        self._order = order
        self._first, self._end = part or (0, rows)
        self._file: h5py.File | None = None
        self._slices: list[Sequences] = []
        self._sequences_of_row: list[NDArray[np.int64]] = []
        self._shard: SequenceShard | None = None

    @property
    def shard(self) -> SequenceShard | None:
        """The rows in memory; None until :meth:`advance` has read the last slice."""
        return self._shard

    def hint(self) -> None:
        """Ask the operating system to prefetch the file. Ignore errors; :meth:`advance` reports them."""
        if hasattr(os, "posix_fadvise"):  # only available on some systems, such as Linux
            with contextlib.suppress(OSError), open(self.path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def advance(self) -> None:
        """Open the file, or read its next slice.

        Raises:
            DataError: the file is missing, unreadable or truncated, or a row violates the limits.
        """
        if self._file is None:
            self.hint()
            self._file = self._open()
            return
        start = self._first + self.rows_read
        stop = min(start + SLICE_ROWS, self._end)
        if start < stop:
            sequences, counts = _Slice(self.path, start, self._columns(start, stop), self._limits).sequences()
            self._slices.append(sequences)
            self._sequences_of_row.append(counts)
            self.rows_read += stop - start
        if stop == self._end:
            self._finish()

    def close(self) -> None:
        """Close the file and free the rows."""
        if self._file is not None:
            self._file.close()
        self._slices, self._sequences_of_row, self._shard = [], [], None

    def read(self) -> Sequences:
        """Read all sequences, in the order ``order``, and close the file. Raises the errors of :meth:`advance`."""
        try:
            while self._shard is None:
                self.advance()
            return self._shard.take(0, self._end - self._first)
        finally:
            self.close()

    def _finish(self) -> None:
        counts = np.concatenate(self._sequences_of_row)
        order = np.arange(len(counts)) if self._order is None else self._order(counts)
        self._shard = SequenceShard(concatenate(self._slices), counts, order)
        self._slices, self._sequences_of_row = [], []

    def _open(self) -> h5py.File:
        packed = self._limits.packed
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(h5py.File(self.path, "r", locking=False))
                for name in (*_RAGGED, *(_LENGTHS if packed else ()), _LABELS):
                    self._check_dataset(file.get(name), name, ragged=packed or name != _LABELS)
            except (OSError, RuntimeError, KeyError, ValueError) as error:
                raise DataError(f"{self.path} cannot be read as HDF5: {error}; {_VERIFY}") from error
            stack.pop_all()  # no error: keep the file open
        return file

    def _check_dataset(self, dataset: object, name: str, ragged: bool) -> None:
        form = f"{'packs' if self._limits.packed else 'single sequences'} have"
        if not isinstance(dataset, h5py.Dataset):
            raise DataError(f"{self.path} lacks the dataset {name} that {form}; {_VERIFY}")
        dtype = h5py.check_vlen_dtype(dataset.dtype) if ragged else dataset.dtype
        if dataset.ndim != 1 or not isinstance(dtype, np.dtype) or dtype.kind not in "iu":
            wanted = "integers of variable length" if ragged else "one integer"
            raise DataError(
                f"{self.path}: {name} is {dataset.dtype} {dataset.shape} where {form} {wanted} for each row"
            )
        if len(dataset) != self._rows:
            raise DataError(
                f"{self.path}: {name} has {len(dataset)} rows where {self._rows} belong into this file; {_VERIFY}"
            )

    def _columns(self, start: int, stop: int) -> dict[str, NDArray]:
        assert self._file is not None
        names = (*_RAGGED, *(_LENGTHS if self._limits.packed else ()), _LABELS)
        try:
            return {name: self._file[name][start:stop] for name in names}
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise DataError(
                f"{self.path}: rows {start} to {stop} cannot be read, the file is damaged: {error}; {_VERIFY}"
            ) from error


class _Slice:
    """Rows as h5py returns them; checks them and converts them to flat columns."""

    def __init__(self, path: Path, first: int, columns: dict[str, NDArray], limits: RowLimits) -> None:
        self._path = path
        self._first = first
        self._limits = limits
        self._flat: dict[str, NDArray[np.integer]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        for name, column in columns.items():
            if column.dtype == object:
                self._flat[name] = np.concatenate(list(column))
                self._counts[name] = np.fromiter(map(len, column), np.int64, len(column))
            else:
                self._flat[name] = column
                self._counts[name] = np.ones(len(column), np.int64)

    def sequences(self) -> tuple[Sequences, NDArray[np.int64]]:
        """Return the sequences, and the number of sequences in each row.

        Raises:
            DataError: a row violates the limits; the message gives the index of the first such row.
        """
        flat, of_row = self._flat, self._counts
        tokens, masked, counts = of_row["input_ids"], of_row["masked_lm_ids"], of_row[_LABELS]
        limits = self._limits
        self._equal(tokens, of_row["segment_ids"], "{} token ids but {} segment ids")
        self._equal(masked, of_row["masked_lm_positions"], "{} masked tokens but {} positions of them")
        self._within(counts, limits.max_sequences, "{} sequences where a row holds 1 to {}", least=1)
        self._within(tokens, limits.max_length, "{} tokens where a row holds 1 to {}", least=1)
        self._within(masked, limits.max_masked, "{} masked tokens where a row holds at most {}")
        lengths, masked_lengths = tokens, masked
        if limits.packed:
            lengths, masked_lengths = (flat[name].astype(np.int64) for name in _LENGTHS)
            for name, sums, what in zip(_LENGTHS, (tokens, masked), ("tokens", "masked tokens"), strict=True):
                self._equal(of_row[name], counts, f"{name} of {{}} sequences but {_LABELS} of {{}}")
                added = np.add.reduceat(flat[name].astype(np.int64), starts_of(counts))
                self._equal(added, sums, f"{name} adds up to {{}} but there are {{}} {what}")
        row_of_sequence = np.repeat(np.arange(len(counts)), counts)
        self._require(lengths >= 1, row_of_sequence, "a sequence of no tokens")
        self._require(masked_lengths >= 0, row_of_sequence, "a negative number of masked tokens")
        positions = self._positions(lengths, masked_lengths, tokens, row_of_sequence)
        self._ids("input_ids", limits.vocabulary, "the vocabulary's")
        self._ids("segment_ids", limits.segment_types, "segment types'")
        self._ids("masked_lm_ids", limits.vocabulary, "the vocabulary's")
        self._ids(_LABELS, 2, "next-sentence labels'")
        made = Sequences(
            lengths.astype(np.int32),
            flat["input_ids"].astype(np.int16, copy=False),
            flat["segment_ids"].astype(np.int8, copy=False),
            masked_lengths.astype(np.int32),
            positions,
            flat["masked_lm_ids"].astype(np.int16, copy=False),
            flat[_LABELS].astype(np.int8, copy=False),
        )
        return made, counts

    def _positions(
        self,
        lengths: NDArray[np.int64],
        masked_lengths: NDArray[np.int64],
        tokens: NDArray[np.int64],
        row_of_sequence: NDArray[np.int64],
    ) -> NDArray[np.int16]:
        """Return the masked positions, counted from the first token of the sequence instead of the row."""
        in_row = starts_of(lengths) - starts_of(tokens)[row_of_sequence]
        positions = self._flat["masked_lm_positions"] - np.repeat(in_row, masked_lengths)
        inside = (positions >= 0) & (positions < np.repeat(lengths, masked_lengths))
        self._require(inside, np.repeat(row_of_sequence, masked_lengths), "a masked position outside its sequence")
        return positions.astype(np.int16)

    def _equal(self, found: NDArray[np.int64], other: NDArray[np.int64], text: str) -> None:
        for row in np.flatnonzero(found != other)[:1]:
            self._refuse(row, text.format(found[row], other[row]))

    def _within(self, found: NDArray[np.int64], most: int, text: str, least: int = 0) -> None:
        for row in np.flatnonzero((found < least) | (found > most))[:1]:
            self._refuse(row, text.format(found[row], most))

    def _ids(self, name: str, count: int, whose: str) -> None:
        ids = self._flat[name]
        if len(ids) and (ids.min() < 0 or ids.max() >= count):
            entry = np.flatnonzero((ids < 0) | (ids >= count))[0]
            row = np.searchsorted(np.cumsum(self._counts[name]), entry, side="right")
            self._refuse(row, f"{name} has {ids[entry]} where {whose} ids are 0 to {count - 1}")

    def _require(self, holds: NDArray[np.bool_], row_of_value: NDArray[np.int64], text: str) -> None:
        if not holds.all():
            self._refuse(row_of_value[np.argmin(holds)], text)

    def _refuse(self, row: np.integer, text: str) -> None:
        raise DataError(f"{self._path}, row {self._first + int(row)}: {text}; {_VERIFY}")


def read_rows(path: Path, rows: int, part: tuple[int, int], limits: RowLimits) -> Sequences:
    """Read rows ``part[0]`` to ``part[1]`` (exclusive) of a file with ``rows`` rows.

    Raises:
        DataError: see :meth:`ShardFile.advance`.
    """
    return ShardFile(path, rows, limits, part=part).read()


def files_of(names: Sequence[str], folder: str) -> list[str]:
    """Return those of ``names`` that are shards directly in ``folder``, sorted by number."""
    return sorted(name for name in names if Path(name).parent == Path(folder) and Path(name).name.startswith("part_"))
