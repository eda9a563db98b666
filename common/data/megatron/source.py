"""Rows of tokens as micro-batches, to train on and to evaluate.

Every batch has ``tokens``, int32 (B, S + 1): the inputs are its first S columns, the labels its last S, and -1 stands
where there is no token, as a label that is not scored (and an input that nothing scored sees: any token will do). Rows
without an extra token (:mod:`common.data.megatron.samples`) have -1 in the last column, so they score S - 1 labels.
Evaluation batches also have ``present``, bool (B,), False for rows of -1 alone that only fill a batch up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.batches import Block, HostBatch
from common.data.megatron.indexed import IndexedTokens, bin_of, open_indexed
from common.data.megatron.samples import SampleIndex, asked_of_each, blended, build_samples
from common.data.order import EvalShard, MicroBatches
from common.errors import ConfigError, DataError

NO_TOKEN = -1


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


class TrainRows:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Rows come in their order from place ``consumed`` on: micro-batch by micro-batch, replica by replica, so that N
    replicas read what one reads that accumulates N micro-batches.

    Args:
        rows: to train on.
        shape: of the rows.
        mine: this replica's micro-batches.
        train_samples: rows of one epoch.
        eval_samples: rows of the evaluation.
        stand_in: whether the data are generated.
        consumed: rows that an earlier training has used.
        pin_memory: of the tensors.
    """

    def __init__(
        self,
        rows: Rows,
        shape: RowShape,
        mine: MicroBatches,
        train_samples: int,
        eval_samples: int,
        stand_in: bool,
        consumed: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.train_samples, self.eval_samples, self.stand_in = train_samples, eval_samples, stand_in
        self._rows, self._shape, self._mine = rows, shape, mine
        self._consumed, self._pin_memory = consumed, pin_memory

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``.

        Raises:
            DataError: the training goes on beyond the rows that it asked for, or a row is damaged.
        """
        first, size = self._mine.first(block), self._mine.micro_batch
        for position in range(start, self._mine.count(block)):
            place = self._consumed + self._mine.everywhere(first + position) * size
            if place + size > len(self._rows):
                raise DataError(
                    f"the training wants row {place + size - 1} of {len(self._rows)}; ask for more rows "
                    "(benchmark.facts.index_rows): the epochs follow from it"
                )
            tensors = _batch(self._rows, range(place, place + size), size, self._shape, self._pin_memory)
            yield HostBatch({"tokens": tensors["tokens"]}, size * self._mine.replicas, position)

    def close(self) -> None:
        """Nothing runs in the background."""


class EvaluationRows:
    """This replica's evaluation batches; a :class:`common.data.batches.EvalSource`.

    Args:
        rows: of the whole set, in their natural order.
        shape: of the rows.
        shard: this replica's rows; every replica has as many batches as the others.
        pin_memory: of the tensors.
    """

    def __init__(self, rows: Rows, shape: RowShape, shard: EvalShard, pin_memory: bool = False) -> None:
        self.eval_samples = shard.eval_samples
        self._rows, self._shape, self._shard, self._pin_memory = rows, shape, shard, pin_memory

    def __len__(self) -> int:
        return self._shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation."""
        for number in range(self._shard.batches):
            tensors = _batch(self._rows, self._shard.samples(number), self._shard.batch, self._shape, self._pin_memory)
            yield HostBatch(tensors, self._shard.batch * self._shard.replicas, number)

    def close(self) -> None:
        """Nothing runs in the background."""


def open_blend(
    prefixes: Sequence[Path],
    weights: Sequence[float],
    shape: RowShape,
    rows: int | None,
    seed: int,
    shuffle_documents: bool,
) -> tuple[Rows, int]:
    """The rows to train on, of one pair of files or of several, and how many one epoch has; after ``run_start``.

    Args:
        prefixes: of the files.
        weights: of the files; one alone is not blended.
        shape: of the rows.
        rows: rows that the training may use, which decides the epochs; None for one epoch.
        seed: of the shuffles.
        shuffle_documents: whether the documents are shuffled too.

    Raises:
        ConfigError: there are not as many weights as files, or several files and no ``rows``.
        DataError: files are missing or damaged, or have too few tokens.
    """
    if len(prefixes) != len(weights) or not prefixes:
        raise ConfigError(f"{len(prefixes)} files and {len(weights)} weights")
    if len(prefixes) == 1:
        asked = [rows]
    elif rows is None:
        raise ConfigError("a blend has to be asked for a number of rows")
    else:
        asked = list(asked_of_each(weights, rows))
    parts, epoch = [], 0
    for prefix, count in zip(prefixes, asked, strict=True):
        opened = open_indexed(prefix)
        lengths = opened.index.lengths
        index = build_samples(
            np.asarray(lengths),
            shape.row_length,
            count,
            extra_token=shape.extra_token,
            seed=seed,
            shuffle_documents=shuffle_documents,
        )
        parts.append(FileRows(opened, index, shape))
        epoch += (int(lengths.sum(dtype=np.int64)) - shape.extra_token) // shape.row_length
    if len(parts) == 1:
        return parts[0], epoch
    assert rows is not None
    return BlendedRows(parts, weights, rows), epoch


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
    lengths = np.asarray(opened.index.lengths)
    index = build_samples(
        lengths, shape.row_length, None, extra_token=shape.extra_token, seed=None, keep_partial=keep_partial
    )
    return FileRows(opened, index, shape)


def example(rows: int, shape: RowShape, seed: int = 0) -> dict[str, Tensor]:
    """A made-up training micro-batch, in host memory."""
    drawn = np.random.default_rng(seed).integers(0, shape.vocabulary, (rows, shape.row_length + 1), dtype=np.int32)
    if not shape.extra_token:
        drawn[:, -1] = NO_TOKEN
    return {"tokens": torch.from_numpy(drawn)}


def _batch(rows: Rows, places: Sequence[int], size: int, shape: RowShape, pin_memory: bool) -> dict[str, Tensor]:
    """``tokens`` and ``present`` of the rows at ``places``, filled up to ``size`` rows."""
    tensors: dict[str, Any] = {
        "tokens": torch.full((size, shape.row_length + 1), NO_TOKEN, dtype=torch.int32, pin_memory=pin_memory),
        "present": torch.zeros(size, dtype=torch.bool, pin_memory=pin_memory),
    }
    tensors["present"][: len(places)] = True
    tokens_BS = tensors["tokens"].numpy()
    for row, place in zip(tokens_BS, places, strict=False):
        rows.read(place, row)
    return tensors
