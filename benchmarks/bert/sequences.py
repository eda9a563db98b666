"""Sequences in memory: flat columns, every sequence's values back to back, as all on-disk formats can be made of them.

N sequences, T tokens and K masked tokens over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 16_384


@dataclass(frozen=True)
class Sequences:
    """Prepared training sequences.

    Attributes:
        lengths: int32 [N], tokens of each sequence.
        input_ids: int16 [T], with masks and random words in place.
        segment_ids: int8 [T], 0 for ``[CLS] A [SEP]``, 1 for ``B [SEP]``.
        masked_lengths: int32 [N], masked tokens of each sequence.
        masked_lm_positions: int16 [K], ascending within a sequence, counted from its first token.
        masked_lm_ids: int16 [K], the tokens that stood there.
        next_sentence_labels: int8 [N], 1 when B is not what follows A.
    """

    lengths: NDArray[np.int32]
    input_ids: NDArray[np.int16]
    segment_ids: NDArray[np.int8]
    masked_lengths: NDArray[np.int32]
    masked_lm_positions: NDArray[np.int16]
    masked_lm_ids: NDArray[np.int16]
    next_sentence_labels: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """The sequences ``rows``, in that order."""
        input_ids, segment_ids = _take_ragged(self.lengths, rows, self.input_ids, self.segment_ids)
        positions, labels = _take_ragged(self.masked_lengths, rows, self.masked_lm_positions, self.masked_lm_ids)
        return Sequences(
            self.lengths[rows],
            input_ids,
            segment_ids,
            self.masked_lengths[rows],
            positions,
            labels,
            self.next_sentence_labels[rows],
        )


def concatenate(pieces: Sequence[Sequences]) -> Sequences:
    """All sequences of ``pieces``, one after another; ``pieces`` is not empty."""
    return Sequences(
        np.concatenate([piece.lengths for piece in pieces]),
        np.concatenate([piece.input_ids for piece in pieces]),
        np.concatenate([piece.segment_ids for piece in pieces]),
        np.concatenate([piece.masked_lengths for piece in pieces]),
        np.concatenate([piece.masked_lm_positions for piece in pieces]),
        np.concatenate([piece.masked_lm_ids for piece in pieces]),
        np.concatenate([piece.next_sentence_labels for piece in pieces]),
    )


def starts_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each piece begins when pieces of ``lengths`` lie back to back."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def _take_ragged(
    lengths: NDArray[np.int32], rows: NDArray[np.integer], *columns: NDArray[Any]
) -> tuple[NDArray[Any], ...]:
    """The pieces ``rows`` of each flat column, whose pieces have ``lengths``; indices for a block of rows at a time."""
    starts, chosen = starts_of(lengths), lengths[rows].astype(np.int64)
    taken = tuple(np.empty(chosen.sum(), column.dtype) for column in columns)
    done = 0
    for block in range(0, len(rows), _BLOCK):
        sizes = chosen[block : block + _BLOCK]
        shift = starts[rows[block : block + _BLOCK]] - starts_of(sizes)
        total = int(sizes.sum())
        indices = np.arange(total) + np.repeat(shift, sizes)
        for column, target in zip(columns, taken, strict=True):
            target[done : done + total] = column[indices]
        done += total
    return taken
