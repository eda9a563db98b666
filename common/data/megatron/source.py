"""Micro-batches of rows of tokens, for training and evaluation.

Every batch has ``tokens``, int32 (B, S + 1). The first S columns are the inputs, the last S are the labels. -1 means
no token: as a label, it is not scored; as an input, it can be replaced by any token, because no scored position sees
it. Rows without an extra token (:mod:`common.data.megatron.samples`) have -1 in the last column, so they score S - 1
labels. Evaluation batches also have ``present``, bool (B,), which is False for padding rows (all -1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.megatron.indexed import IndexedTokens, bin_of, open_indexed
from common.data.megatron.samples import SampleIndex, asked_of_each, blended, build_samples
from common.data.order import EvalShard, ReplicaStream
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.errors import ConfigError, DataError

NO_TOKEN = -1
AHEAD = 4
"""Number of batches that a thread reads ahead: rows of shuffled documents are scattered over a large file."""


@dataclass(frozen=True)
class RowShape:
    """Sizes of the rows.

    Attributes:
        row_length: S, in tokens.
        vocabulary: vocabulary size of the model.
        extra_token: whether a row has a label for its last token: the first token of the next row.
    """

    row_length: int
    vocabulary: int
    extra_token: bool


class TokenRows(Protocol):
    """Rows by position in the training or evaluation."""

    def __len__(self) -> int: ...

    def read(self, position: int, row: NDArray[np.int32]) -> None:
        """Write the tokens of row ``position`` into ``row`` (S + 1,), which is filled with -1."""
        ...


class FileRows:
    """The rows of one pair of files.

    Args:
        index: start and order of the rows.
    """

    def __init__(self, opened: IndexedTokens, index: SampleIndex, shape: RowShape) -> None:
        self._opened, self._index, self._shape = opened, index, shape

    def __len__(self) -> int:
        return len(self._index)

    def read(self, position: int, row: NDArray[np.int32]) -> None:
        """Write the tokens of row ``position`` into ``row`` (S + 1,), which is filled with -1.

        Raises:
            DataError: a token is outside the vocabulary; the message names file and sequence.
        """
        filled = 0
        for document, start, stop in self._index.pieces(position, self._opened.index.lengths):
            tokens = self._opened.sequence(document, start, stop)
            row[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
        low, high = int(row[:filled].min()), int(row[:filled].max())
        if low < 0 or high >= self._shape.vocabulary:
            raise self._outside(position)

    def scored(self) -> int:
        """Return the number of labels of all rows."""
        (last, end), before = self._index.starts[-1], self._index.starts[-2]
        full, extra = len(self) - 1, self._index.extra_token
        lengths = self._opened.index.lengths[self._index.documents[int(before[0]) : int(last) + 1]]
        final = int(lengths[:-1].sum(dtype=np.int64)) - int(before[1]) + int(end)
        return full * (self._shape.row_length - 1 + extra) + final - 1 + extra

    def _outside(self, position: int) -> DataError:
        for document, start, stop in self._index.pieces(position, self._opened.index.lengths):
            tokens = self._opened.sequence(document, start, stop).astype(np.int64)
            wrong = tokens[(tokens < 0) | (tokens >= self._shape.vocabulary)]
            if len(wrong):
                break
        return DataError(
            f"{bin_of(self._opened.prefix)}, sequence {document}: token {wrong[0]} lies outside the model's vocabulary "
            f"of {self._shape.vocabulary}: it was prepared with another tokenizer, or is damaged"
        )


class BlendedRows:
    """The rows of several pairs of files, in the order of their blend.

    Args:
        parts: rows of each file.
    """

    def __init__(self, parts: Sequence[TokenRows], weights: Sequence[float], rows: int) -> None:
        self._parts = parts
        self._files, self._numbers = blended(weights, rows)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, position: int, row: NDArray[np.int32]) -> None:
        """Write the tokens of row ``position`` into ``row``; see :meth:`FileRows.read`."""
        self._parts[self._files[position]].read(int(self._numbers[position]), row)


@dataclass(frozen=True)
class RowStream(ReplicaStream):
    """One replica's part of the training; a :class:`common.data.order.SampleStream`.

    Rows are used in order from position ``consumed`` on: micro-batch by micro-batch, replica by replica. So N
    replicas read the same rows as one replica that accumulates N micro-batches.

    Attributes:
        consumed: number of rows that an earlier training has used.
    """

    consumed: int = 0

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return (0, position) for each row of this replica's micro-batch ``number``, from 0 over the whole training.

        Raises:
            DataError: the micro-batch needs more rows than there are.
        """
        first = self.consumed + self.mine.global_index(number) * self.micro_batch
        if first + self.micro_batch > self.train_samples:
            raise DataError(
                f"the training wants row {first + self.micro_batch - 1} of {self.train_samples}; let the recipe ask "
                "for more rows, and the epochs follow from it"
            )
        return [(0, position) for position in range(first, first + self.micro_batch)]


def train_source(
    rows: TokenRows,
    shape: RowShape,
    stream: RowStream,
    eval_samples: int,
    synthetic: bool,
    pin_memory: bool = False,
    ahead: int = AHEAD,
) -> ThreadedTrainSource:
    """Return the training micro-batches of one replica; a damaged row raises :class:`common.errors.DataError`.

    Args:
        stream: selects the rows of this replica.
        eval_samples: rows of the evaluation.
        synthetic: whether the data are synthetic.
        pin_memory: use pinned memory, for asynchronous copies to a GPU.
        ahead: number of micro-batches that are read ahead.
    """
    threads = SampleThreads(1, ahead)

    def begin(number: int) -> PendingBatch:
        positions = [position for _, position in stream.samples_of(number)]
        return _begin(threads, rows, positions, _empty(stream.micro_batch, shape, pin_memory))

    return ThreadedTrainSource(stream, eval_samples, synthetic, threads, begin, _nothing)


def eval_source(rows: TokenRows, shape: RowShape, shard: EvalShard, pin_memory: bool = False) -> ThreadedEvalSource:
    """Return the evaluation batches of one replica; a damaged row raises :class:`common.errors.DataError`.

    Args:
        rows: rows of the whole set, in natural order.
        shard: this replica's rows; all replicas have the same number of batches.
        pin_memory: use pinned memory, for asynchronous copies to a GPU.
    """
    threads = SampleThreads(1, AHEAD)

    def begin(positions: Sequence[int]) -> PendingBatch:
        present = torch.zeros(shard.batch, dtype=torch.bool, pin_memory=pin_memory)
        present[: len(positions)] = True
        tensors = {**_empty(shard.batch, shape, pin_memory), "present": present}
        return _begin(threads, rows, positions, tensors)

    return ThreadedEvalSource(shard, threads, begin, _nothing)


def open_blend(
    prefixes: Sequence[Path],
    weights: Sequence[float],
    shape: RowShape,
    rows: int,
    seed: int,
    shuffle_documents: bool,
) -> TokenRows:
    """Return the training rows of one or several pairs of files. Call it after ``run_start``.

    Args:
        prefixes: paths of the pairs without ``.bin`` and ``.idx``.
        weights: weight of each pair in the blend; a single pair is not blended.
        rows: number of rows that the training may use, which decides the number of epochs.
        shuffle_documents: whether the documents are shuffled, too.

    Raises:
        ConfigError: the numbers of weights and files differ.
        DataError: files are missing or damaged, or have too few tokens.
    """
    if len(prefixes) != len(weights) or not prefixes:
        raise ConfigError(f"{len(prefixes)} files and {len(weights)} weights")
    asked = [rows] if len(prefixes) == 1 else asked_of_each(weights, rows)
    parts = []
    for prefix, count in zip(prefixes, asked, strict=True):
        opened = open_indexed(prefix)
        index = build_samples(
            opened.index.lengths.copy(),  # the mapped array is not aligned
            shape.row_length,
            count,
            extra_token=shape.extra_token,
            seed=seed,
            shuffle_documents=shuffle_documents,
        )
        parts.append(FileRows(opened, index, shape))
    return parts[0] if len(parts) == 1 else BlendedRows(parts, weights, rows)


def open_in_order(prefix: Path, shape: RowShape, keep_partial: bool) -> FileRows:
    """Return the rows of one pair of files in natural order, not shuffled. Call it after ``run_start``.

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``.
        keep_partial: whether the remaining tokens at the end become a last, shorter row.

    Raises:
        DataError: files are missing or damaged, or have too few tokens.
    """
    opened = open_indexed(prefix)
    index = build_samples(
        opened.index.lengths.copy(),
        shape.row_length,
        None,
        extra_token=shape.extra_token,
        seed=None,
        keep_partial=keep_partial,
    )
    return FileRows(opened, index, shape)


def example(rows: int, shape: RowShape, seed: int = 0) -> dict[str, Tensor]:
    """Return a synthetic training micro-batch, in host memory: ``tokens``, int32 (rows, row length + 1).

    Without labels of last tokens, the last column is ``NO_TOKEN``.
    """
    drawn = np.random.default_rng(seed).integers(0, shape.vocabulary, (rows, shape.row_length + 1), dtype=np.int32)
    if not shape.extra_token:
        drawn[:, -1] = NO_TOKEN
    return {"tokens": torch.from_numpy(drawn)}


def _empty(rows: int, shape: RowShape, pin_memory: bool) -> dict[str, Tensor]:
    size = (rows, shape.row_length + 1)
    return {"tokens": torch.full(size, NO_TOKEN, dtype=torch.int32, pin_memory=pin_memory)}


def _begin(
    threads: SampleThreads, rows: TokenRows, positions: Sequence[int], tensors: dict[str, Tensor]
) -> PendingBatch:
    tokens_BS = tensors["tokens"].numpy()

    def fill(slot: int) -> None:
        rows.read(positions[slot], tokens_BS[slot])

    return threads.begin(tensors, len(positions), fill)


def _nothing() -> None:
    """Do nothing: a mapped file is closed when its last array is deleted."""
