"""Rows of tokens as micro-batches, to train on and to evaluate.

Every batch has ``tokens``, int32 (B, S + 1): the inputs are its first S columns, the labels its last S, and -1 stands
where there is no token, as a label that is not scored (and an input that nothing scored sees: any token will do). Rows
without an extra token (:mod:`common.data.megatron.samples`) have -1 in the last column, so they score S - 1 labels.
Evaluation batches also have ``present``, bool (B,), False for rows of -1 alone that only fill a batch up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.batches import Block
from common.data.megatron.indexed import IndexedTokens, bin_of, open_indexed
from common.data.megatron.samples import SampleIndex, asked_of_each, blended, build_samples
from common.data.order import EvalShard, MicroBatches
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.errors import ConfigError, DataError

NO_TOKEN = -1
AHEAD = 4
"""Batches that a thread reads ahead: rows of shuffled documents lie all over a large file."""


@dataclass(frozen=True)
class RowShape:
    """What rows are like.

    Attributes:
        row_length: S.
        vocabulary: tokens that the model knows.
        extra_token: whether a row has a label for its last token, which is the next row's first.
    """

    row_length: int
    vocabulary: int
    extra_token: bool


class Rows(Protocol):
    """Rows by their places in the training, or in the evaluation."""

    def __len__(self) -> int: ...

    def read(self, place: int, row: NDArray[np.int32]) -> None:
        """Put the tokens at ``place`` into ``row`` (S + 1,), which is full of -1."""
        ...


class FileRows:
    """The rows of one pair of files.

    Args:
        opened: the files.
        index: which rows they make.
        shape: of the rows.
    """

    def __init__(self, opened: IndexedTokens, index: SampleIndex, shape: RowShape) -> None:
        self._opened, self._index, self._shape = opened, index, shape

    def __len__(self) -> int:
        return len(self._index)

    def read(self, place: int, row: NDArray[np.int32]) -> None:
        """Put the tokens at ``place`` into ``row``.

        Raises:
            DataError: a token lies outside the vocabulary; the message names file and sequence.
        """
        filled = 0
        for document, start, stop in self._index.pieces(place, self._opened.index.lengths):
            tokens = self._opened.sequence(document, start, stop)
            row[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
        low, high = int(row[:filled].min()), int(row[:filled].max())
        if low < 0 or high >= self._shape.vocabulary:
            raise self._outside(place)

    def scored(self) -> int:
        """Labels of all rows."""
        (last, end), before = self._index.starts[-1], self._index.starts[-2]
        full, extra = len(self) - 1, self._index.extra_token
        lengths = self._opened.index.lengths[self._index.documents[int(before[0]) : int(last) + 1]]
        final = int(lengths[:-1].sum(dtype=np.int64)) - int(before[1]) + int(end)
        return full * (self._shape.row_length - 1 + extra) + final - 1 + extra

    def _outside(self, place: int) -> DataError:
        for document, start, stop in self._index.pieces(place, self._opened.index.lengths):
            tokens = self._opened.sequence(document, start, stop).astype(np.int64)
            wrong = tokens[(tokens < 0) | (tokens >= self._shape.vocabulary)]
            if len(wrong):
                break
        return DataError(
            f"{bin_of(self._opened.prefix)}, sequence {document}: token {wrong[0]} lies outside the model's vocabulary "
            f"of {self._shape.vocabulary}: it was prepared with another tokenizer, or is damaged"
        )


class BlendedRows:
    """The rows of several pairs of files in the order of their blend.

    Args:
        parts: rows of each file.
        weights: of the files.
        rows: how many.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float], rows: int) -> None:
        self._parts = parts
        self._files, self._numbers = blended(weights, rows)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, place: int, row: NDArray[np.int32]) -> None:
        """Put the tokens at ``place`` into ``row``; see :meth:`FileRows.read`."""
        self._parts[self._files[place]].read(int(self._numbers[place]), row)


@dataclass(frozen=True)
class RowStream:
    """One replica's part of the training; a :class:`common.data.order.SampleStream`.

    Rows come in their order from place ``consumed`` on: micro-batch by micro-batch, replica by replica, so that N
    replicas read what one reads that accumulates N micro-batches.

    Attributes:
        mine: this replica's micro-batches.
        train_samples: rows that there are.
        consumed: rows that an earlier training has used.
    """

    mine: MicroBatches
    train_samples: int
    consumed: int = 0

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch of one replica."""
        return self.mine.micro_batch

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return self.mine.replicas

    def first_micro_batch(self, block: Block) -> int:
        """Micro-batches that this replica was given before ``block``."""
        return self.mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Micro-batches of this replica in ``block``."""
        return self.mine.count(block)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """0 and the place of each row of this replica's micro-batch ``number``, from 0 over the whole training.

        Raises:
            DataError: it lies beyond the rows that there are.
        """
        first = self.consumed + self.mine.everywhere(number) * self.micro_batch
        if first + self.micro_batch > self.train_samples:
            raise DataError(
                f"the training wants row {first + self.micro_batch - 1} of {self.train_samples}; let the recipe ask "
                "for more rows, and the epochs follow from it"
            )
        return [(0, place) for place in range(first, first + self.micro_batch)]

    def key(self, number: int) -> Hashable:
        """All are alike."""
        return ()


def train_source(
    rows: Rows,
    shape: RowShape,
    stream: RowStream,
    eval_samples: int,
    stand_in: bool,
    pin_memory: bool = False,
    ahead: int = AHEAD,
) -> ThreadedTrainSource:
    """Training micro-batches of one replica; a row that is damaged is a :class:`common.errors.DataError`.

    Args:
        rows: to train on.
        shape: of the rows.
        stream: which of them this replica has.
        eval_samples: rows of the evaluation.
        stand_in: whether the data are generated.
        pin_memory: of the tensors.
        ahead: micro-batches that are read ahead.
    """
    threads = SampleThreads(1, ahead)

    def begin(number: int) -> PendingBatch:
        places = [place for _, place in stream.samples_of(number)]
        return _begin(threads, rows, places, _empty(stream.micro_batch, shape, pin_memory))

    return ThreadedTrainSource(stream, eval_samples, stand_in, threads, begin, _nothing)


def eval_source(
    rows: Rows, shape: RowShape, shard: EvalShard, pin_memory: bool = False, ahead: int = AHEAD
) -> ThreadedEvalSource:
    """Evaluation batches of one replica; raises as training does.

    Args:
        rows: of the whole set, in their natural order.
        shape: of the rows.
        shard: this replica's rows; every replica has as many batches as the others.
        pin_memory: of the tensors.
        ahead: batches that are read ahead.
    """
    threads = SampleThreads(1, ahead)

    def begin(places: Sequence[int]) -> PendingBatch:
        present = torch.zeros(shard.batch, dtype=torch.bool, pin_memory=pin_memory)
        present[: len(places)] = True
        tensors = {**_empty(shard.batch, shape, pin_memory), "present": present}
        return _begin(threads, rows, places, tensors)

    return ThreadedEvalSource(shard, threads, begin, _nothing)


def open_blend(
    prefixes: Sequence[Path],
    weights: Sequence[float],
    shape: RowShape,
    rows: int,
    seed: int,
    shuffle_documents: bool,
) -> Rows:
    """The rows to train on, of one pair of files or of several; after ``run_start``.

    Args:
        prefixes: of the files.
        weights: of the files; one alone is not blended.
        shape: of the rows.
        rows: rows that the training may use, which decides the epochs.
        seed: of the shuffles.
        shuffle_documents: whether the documents are shuffled too.

    Raises:
        ConfigError: there are not as many weights as files.
        DataError: files are missing or damaged, or have too few tokens.
    """
    if len(prefixes) != len(weights) or not prefixes:
        raise ConfigError(f"{len(prefixes)} files and {len(weights)} weights")
    asked = [rows] if len(prefixes) == 1 else asked_of_each(weights, rows)
    parts = []
    for prefix, count in zip(prefixes, asked, strict=True):
        opened = open_indexed(prefix)
        index = build_samples(
            opened.index.lengths.copy(),  # those of the file lie at odd addresses
            shape.row_length,
            count,
            extra_token=shape.extra_token,
            seed=seed,
            shuffle_documents=shuffle_documents,
        )
        parts.append(FileRows(opened, index, shape))
    return parts[0] if len(parts) == 1 else BlendedRows(parts, weights, rows)


def open_in_order(prefix: Path, shape: RowShape, keep_partial: bool) -> FileRows:
    """The rows of one pair of files in their natural order, not shuffled; after ``run_start``.

    Args:
        prefix: of the files.
        shape: of the rows.
        keep_partial: whether the tokens that are left at the end make a row, too.

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
    """A made-up training micro-batch, in host memory."""
    drawn = np.random.default_rng(seed).integers(0, shape.vocabulary, (rows, shape.row_length + 1), dtype=np.int32)
    if not shape.extra_token:
        drawn[:, -1] = NO_TOKEN
    return {"tokens": torch.from_numpy(drawn)}


def _empty(rows: int, shape: RowShape, pin_memory: bool) -> dict[str, Tensor]:
    size = (rows, shape.row_length + 1)
    return {"tokens": torch.full(size, NO_TOKEN, dtype=torch.int32, pin_memory=pin_memory)}


def _begin(threads: SampleThreads, rows: Rows, places: Sequence[int], tensors: dict[str, Tensor]) -> PendingBatch:
    tokens_BS = tensors["tokens"].numpy()

    def fill(slot: int) -> None:
        rows.read(places[slot], tokens_BS[slot])

    return threads.begin(tensors, len(places), fill)


def _nothing() -> None:
    """Maps are closed with the last array that looks into them."""
