"""Cut documents into rows of a fixed length, as Megatron's GPT dataset does.

The documents are concatenated, epoch after epoch, and this stream of tokens is cut every S tokens. Three arrays
describe it (Megatron-Core, ``gpt_dataset.py``; random numbers come from numpy's ``RandomState``, which shuffles the
documents before the rows):

- the document index: the document at each position of the stream, shuffled over all epochs, or in natural order;
- the sample index: the start of each row, as a position in the document index and a token offset in that document;
- the shuffle index: the row number at each position of the training.

If the training uses only a small part of its last epoch, that epoch is shuffled separately, after the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, DataError

LAST_EPOCH_SHARE = 0.80
"""The last epoch is shuffled separately if less than this fraction of it is used."""
MARGIN = 1.005
"""Ratio of the rows that are requested from each file of a blend to its share of the rows."""
_CHUNK = 1 << 24  # documents per chunk of the cumulative sum


class TokenRange(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class SampleIndex:
    """Rows of fixed length, as ranges of tokens of documents.

    Attributes:
        documents: int32, (epochs * documents,): the document index.
        starts: int32 or int64, (R + 1, 2): the sample index; the last entry is the end of the last row.
        order: uint32 or int64, (R,): the shuffle index.
        extra_token: 1 if a row also has the first token of the next row, as the label of its last token; otherwise 0.
    """

    documents: NDArray[np.int32]
    starts: NDArray[np.signedinteger]
    order: NDArray[np.integer]
    extra_token: int

    def __len__(self) -> int:
        return len(self.order)

    def pieces(self, position: int, lengths: NDArray[np.int32]) -> Iterator[TokenRange]:
        """Yield the pieces of row ``position`` of the training, in order.

        Args:
            lengths: number of tokens of each document.
        """
        row = int(self.order[position])
        (first, skipped), (last, end) = ((int(entry[0]), int(entry[1])) for entry in self.starts[row : row + 2])
        for number in range(first, last + 1):
            document = int(self.documents[number])
            stop = end + self.extra_token if number == last else int(lengths[document])
            start = skipped if number == first else 0
            if stop > start:
                yield TokenRange(document, start, stop)


def epochs_for(rows: int, tokens: int, row_length: int, extra_token: int) -> int:
    """Return the number of epochs of ``tokens`` tokens that give at least ``rows`` rows of ``row_length`` tokens."""
    return max(1, -(-(rows * row_length + extra_token) // tokens))


def build_samples(
    lengths: NDArray[np.int32],
    row_length: int,
    rows: int | None,
    *,
    extra_token: bool,
    seed: int | None,
    shuffle_documents: bool = False,
    keep_partial: bool = False,
) -> SampleIndex:
    """Return the rows of documents.

    Args:
        lengths: int32, (N,): number of tokens of each document.
        rows: minimum number of rows, which decides the number of epochs; None: one epoch.
        extra_token: see :class:`SampleIndex`.
        seed: seed of both shuffles; None keeps rows and documents in natural order.
        shuffle_documents: whether the documents are shuffled, too.
        keep_partial: whether the remaining tokens at the end become a last, shorter row.

    Raises:
        ConfigError: a size is impossible.
        DataError: the documents have no tokens, or too few for a row.
    """
    if row_length < 2 or (rows is not None and rows < 1):
        raise ConfigError(f"{rows} rows of {row_length} tokens: at least 1 row of 2")
    extra, tokens = int(extra_token), int(lengths.sum(dtype=np.int64))
    if not tokens:
        raise DataError("the documents have no tokens")
    epochs = 1 if rows is None else epochs_for(rows, tokens, row_length, extra)
    usable = epochs * tokens - extra
    count = -(-usable // row_length) if keep_partial else usable // row_length
    if count < 1:
        raise DataError(f"{tokens} tokens make no row of {row_length}{' and the one behind it' if extra else ''}")
    before = ((epochs - 1) * tokens - extra) // row_length  # rows without the last epoch
    separate = (
        rows is not None and epochs > 1 and rows - before < int(LAST_EPOCH_SHARE * ((tokens - extra) // row_length))
    )
    random = None if seed is None else np.random.RandomState(seed % 2**32)
    documents = _document_index(len(lengths), epochs, separate, random if shuffle_documents else None)
    starts = _sample_index(lengths, documents, row_length, count, extra)
    return SampleIndex(documents, starts, _shuffle_index(before if separate else count, count, random), extra)


def _document_index(
    documents: int, epochs: int, separate: bool, random: np.random.RandomState | None
) -> NDArray[np.int32]:
    if separate:
        return np.concatenate([_document_index(documents, part, False, random) for part in (epochs - 1, 1)])
    index = np.tile(np.arange(documents, dtype=np.int32), epochs)
    if random is not None:
        random.shuffle(index)
    return index


def _sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], row_length: int, rows: int, extra: int
) -> NDArray[np.signedinteger]:
    """Return the start of each row, and the end of the last row.

    Row i ends in the first document at whose end at least (i + 1) S + extra tokens are used. Without an extra token,
    a row can therefore end at the end of a document, and the next row starts there, with no tokens left in it.
    """
    kind = np.int32 if len(documents) < 2**31 else np.int64
    starts = np.zeros((rows + 1, 2), kind)
    done, used = 1, 0  # number of known entries; tokens in all documents before the chunk
    for first in range(0, len(documents), _CHUNK):
        chunk = lengths[documents[first : first + _CHUNK]]
        ends = np.cumsum(chunk, dtype=np.int64) + used
        until = min(rows, (int(ends[-1]) - extra) // row_length)
        cuts = np.arange(done, until + 1, dtype=np.int64) * row_length
        positions = np.searchsorted(ends, cuts + extra, "left")
        starts[done : until + 1, 0] = positions + first
        starts[done : until + 1, 1] = cuts - (ends[positions] - chunk[positions])
        done, used = max(done, until + 1), int(ends[-1])
    if done <= rows:  # the last row is shorter than the others
        starts[rows] = len(documents) - 1, int(lengths[documents[-1]]) - extra
    return starts


def _shuffle_index(together: int, rows: int, random: np.random.RandomState | None) -> NDArray[np.integer]:
    """Return rows 0 to ``together`` shuffled, followed by the remaining rows shuffled separately."""
    kind = np.uint32 if rows < np.iinfo(np.uint32).max - 1 else np.int64
    index: NDArray[np.integer] = np.arange(rows).astype(kind, copy=False)
    if random is not None:
        random.shuffle(index[:together])
        if together < rows:
            random.shuffle(index[together:])
    return index


def blended(weights: Sequence[float], rows: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the file of each row of a blend, and the row number in that file, in Megatron's greedy order.

    Row i comes from the file d with the largest ``w_d max(i, 1) - rows taken from d``; the first one wins a tie.

    Args:
        weights: weights of the files; any positive numbers.

    Returns:
        File of each row (int16), and its row number there (int64).

    Raises:
        ConfigError: a weight is not positive.
    """
    if not weights or min(weights) <= 0:
        raise ConfigError(f"weights {list(weights)} of a blend: positive numbers")
    positions = np.arange(rows, dtype=np.int64)
    if len(set(weights)) == 1:  # equal weights: the files take turns
        return (positions % len(weights)).astype(np.int16), positions // len(weights)
    shares = [weight / math.fsum(weights) for weight in weights]
    taken = [0] * len(shares)
    files, numbers = np.empty(rows, np.int16), np.empty(rows, np.int64)
    for position in range(rows):
        scale = max(position, 1)
        errors = [share * scale - count for share, count in zip(shares, taken, strict=True)]
        chosen = errors.index(max(errors))
        files[position], numbers[position] = chosen, taken[chosen]
        taken[chosen] += 1
    return files, numbers


def asked_of_each(weights: Sequence[float], rows: int) -> list[int]:
    """Return the number of rows to request from each file of a blend of ``rows``, slightly more than its share."""
    return [math.ceil(rows * weight / math.fsum(weights) * MARGIN) for weight in weights]
