"""Sequences to the tensors of one micro-batch: fixed shapes, int32, in one piece of host memory.

T tokens (the flat buffer's capacity), S sequences (capacity), M masked tokens (capacity):

====================  =====  ==================================================================================
input_ids             [T]    the tokens of all sequences; 0 where there is none
segment_ids           [T]    0 or 1
position_ids          [T]    restarts at 0 in each sequence
starts                [S]    first token of each sequence in the flat buffer; 0 for absent ones, which come last
lengths               [S]    tokens of each sequence; 0 for absent ones
masked_positions      [M]    index into the flat buffer; 0 for unused entries
masked_labels         [M]    vocabulary id; -1 for unused entries
next_sentence_labels  [S]    0 or 1; -1 for absent sequences
dropout_seed          []     int64
====================  =====  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.bert.config import Facts, ReaderConfig
from benchmarks.bert.sequences import Sequences, concatenate
from common.data.ragged import starts_of
from common.errors import DataError

_SEED_ENTRIES = 2  # the int64 seed lies in two entries of the int32 buffer


@dataclass(frozen=True)
class BatchShape:
    """Capacities of a micro-batch.

    Attributes:
        tokens: T, a whole number of rows.
        sequences: S.
        masked: M.
        row_length: tokens of a row, and of the longest sequence.
    """

    tokens: int
    sequences: int
    masked: int
    row_length: int

    def for_count(self, sequences: int) -> BatchShape:
        """The same with room for exactly ``sequences``."""
        return replace(self, sequences=sequences)

    def entries(self) -> dict[str, int]:
        """Name to number of entries of every int32 tensor."""
        t, s, m = self.tokens, self.sequences, self.masked
        return {
            "input_ids": t,
            "segment_ids": t,
            "position_ids": t,
            "starts": s,
            "lengths": s,
            "masked_positions": m,
            "masked_labels": m,
            "next_sentence_labels": s,
        }


def training_shape(facts: Facts, reader: ReaderConfig, rows: int) -> BatchShape:
    """The shape of a training micro-batch of ``rows`` rows."""
    packed = reader.format == "packed"
    return BatchShape(
        tokens=rows * facts.max_sequence_length,
        sequences=rows * (facts.max_sequences_per_pack if packed else 1),
        masked=rows * (facts.max_masked_per_row if packed else facts.max_masked_per_sequence),
        row_length=facts.max_sequence_length,
    )


def evaluation_shape(facts: Facts, rows: int) -> BatchShape:
    """The shape of an evaluation batch: single sequences back to back in the room of ``rows`` rows."""
    return BatchShape(
        tokens=rows * facts.max_sequence_length,
        sequences=rows * facts.max_sequences_per_pack,
        masked=rows * max(facts.max_masked_per_row, facts.max_masked_per_sequence),
        row_length=facts.max_sequence_length,
    )


def collate(
    pieces: Sequence[Sequences], shape: BatchShape, dropout_seed: int, pin_memory: bool = False
) -> dict[str, Tensor]:
    """The tensors of a micro-batch of the sequences of all ``pieces``, in that order.

    Args:
        pieces: at least one; each row's sequences checked as :mod:`benchmarks.bert.shards` does.
        shape: what they must fit.
        dropout_seed: of this micro-batch, in [0, 2**63).
        pin_memory: for a copy that does not wait.

    Raises:
        DataError: they do not fit.
    """
    every = pieces[0] if len(pieces) == 1 else concatenate(pieces)
    lengths = every.lengths.astype(np.int64)
    count, tokens, masked = len(lengths), len(every.input_ids), len(every.masked_lm_ids)
    _require_room(lengths, tokens, masked, shape)
    starts = starts_of(lengths)

    tensors, arrays = _allocate(shape, dropout_seed, pin_memory)
    arrays["input_ids"][:tokens] = every.input_ids
    arrays["segment_ids"][:tokens] = every.segment_ids
    arrays["position_ids"][:tokens] = np.arange(tokens) - np.repeat(starts, lengths)
    arrays["starts"][:count] = starts
    arrays["lengths"][:count] = lengths
    arrays["masked_positions"][:masked] = every.masked_lm_positions + np.repeat(starts, every.masked_lengths)
    arrays["masked_labels"][:masked] = every.masked_lm_ids
    arrays["masked_labels"][masked:] = -1
    arrays["next_sentence_labels"][:count] = every.next_sentence_labels
    arrays["next_sentence_labels"][count:] = -1
    return tensors


def example_lengths(shape: BatchShape, count: int | None = None) -> list[int]:
    """Lengths of made-up sequences that fill the rows of ``shape``.

    Args:
        shape: of the micro-batch.
        count: sequences, at least one and at most the capacity a row. Where it is not given, rows that hold three are
            mixed as in the real set: about as many of three as of one, and one in 21 of two.
    """
    rows, room = shape.tokens // shape.row_length, shape.sequences // (shape.tokens // shape.row_length)
    if count is None:
        twos = round(rows / 21) if room > 2 else 0
        threes = (rows - twos) // 2 if room > 2 else 0
        of_row = [1] * (rows - twos - threes) + [2] * twos + [3] * threes
    else:
        of_row = [count // rows + (row < count % rows) for row in range(rows)]
    return [
        shape.row_length // sequences + (number < shape.row_length % sequences)
        for sequences in of_row
        for number in range(sequences)
    ]


def example(shape: BatchShape, vocabulary: int, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Made-up tensors of ``shape``: random words in sequences of ``lengths``, about 15 % of them masked."""
    count, length_N = len(lengths), np.array(lengths, np.int64)
    masked_N = np.diff(np.minimum(np.cumsum(np.maximum(1, length_N * 3 // 20)), shape.masked), prepend=0)
    random = np.random.default_rng(0)
    halves = [np.arange(length) * 2 // length for length in lengths]
    positions = [np.arange(masked) * length // masked for length, masked in zip(lengths, masked_N, strict=True)]
    made = Sequences(
        length_N.astype(np.int32),
        random.integers(0, vocabulary, length_N.sum()).astype(np.int16),
        np.concatenate(halves).astype(np.int8),
        masked_N.astype(np.int32),
        np.concatenate(positions).astype(np.int16),
        random.integers(0, vocabulary, masked_N.sum()).astype(np.int16),
        (np.arange(count) % 2).astype(np.int8),
    )
    return collate([made], shape, dropout_seed=1)


def _require_room(lengths: NDArray[np.int64], tokens: int, masked: int, shape: BatchShape) -> None:
    for found, capacity, what in (
        (len(lengths), shape.sequences, "sequences"),
        (tokens, shape.tokens, "tokens"),
        (masked, shape.masked, "masked tokens"),
    ):
        if found > capacity:
            raise DataError(
                f"a micro-batch has {found} {what} where {capacity} fit: these are not the data that the "
                "benchmark's facts describe"
            )


def _allocate(
    shape: BatchShape, dropout_seed: int, pin_memory: bool
) -> tuple[dict[str, Tensor], dict[str, NDArray[np.int32]]]:
    """Zeros as tensors, and as numpy sees them. One allocation: pinned memory is dear to get."""
    entries = shape.entries()
    buffer = torch.empty(_SEED_ENTRIES + sum(entries.values()), dtype=torch.int32, pin_memory=pin_memory)
    buffer.numpy().fill(0)  # torch would wake its threads for it, and wait for the slowest
    parts = buffer[_SEED_ENTRIES:].split(list(entries.values()))
    tensors = dict(zip(entries, parts, strict=True))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    seed = buffer[:_SEED_ENTRIES].view(torch.int64)
    seed.numpy()[0] = dropout_seed
    return {**tensors, "dropout_seed": seed[0]}, arrays
