"""Sequences in memory: flat columns in which the values of all sequences are back to back.

N is the number of sequences, T and K are the total numbers of tokens and masked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data import ragged


@dataclass(frozen=True)
class Sequences:
    """Prepared training sequences.

    Attributes:
        lengths: int32 [N], tokens of each sequence.
        input_ids: int16 [T], after replacing tokens by ``[MASK]`` and random words.
        segment_ids: int8 [T], 0 for ``[CLS] A [SEP]``, 1 for ``B [SEP]``.
        masked_lengths: int32 [N], masked tokens of each sequence.
        masked_lm_positions: int16 [K], ascending within a sequence, counted from its first token.
        masked_lm_ids: int16 [K], the original tokens at these positions.
        next_sentence_labels: int8 [N], 1 if B does not follow A in the text.
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

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """The columns in the order of the attributes."""
        return (
            self.lengths,
            self.input_ids,
            self.segment_ids,
            self.masked_lengths,
            self.masked_lm_positions,
            self.masked_lm_ids,
            self.next_sentence_labels,
        )

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """Return the sequences with the indices ``rows``, in that order."""
        input_ids, segment_ids = ragged.take(self.lengths, rows, self.input_ids, self.segment_ids)
        positions, labels = ragged.take(self.masked_lengths, rows, self.masked_lm_positions, self.masked_lm_ids)
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
    """Concatenate ``pieces``, which must not be empty."""
    return Sequences(*map(np.concatenate, zip(*(piece.columns for piece in pieces), strict=True)))
