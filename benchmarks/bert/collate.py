"""Convert sequences to the tensors of one micro-batch: fixed shapes, int32, one allocation in host memory.

Capacities of a micro-batch: T tokens (of the flat buffer), S sequences, M masked tokens.

====================  =====  ==================================================================================
input_ids             [T]    tokens of all sequences; 0 for unused entries
segment_ids           [T]    0 or 1
position_ids          [T]    restarts at 0 in each sequence
starts                [S]    index of the first token of each sequence; 0 for absent sequences, which come last
lengths               [S]    tokens of each sequence; 0 for absent sequences
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

_SEED_ENTRIES = 2  # the int64 seed takes two entries of the int32 buffer


@dataclass(frozen=True)
class BatchCapacities:
    """Capacities of a micro-batch.

    Attributes:
        tokens: T, a multiple of ``row_length``.
        sequences: S.
        masked: M.
        row_length: tokens per row, and the maximum length of a sequence.
    """

    tokens: int
    sequences: int
    masked: int
    row_length: int

    def for_count(self, sequences: int) -> BatchCapacities:
        """Return a copy whose capacity is exactly ``sequences`` sequences."""
        return replace(self, sequences=sequences)

    def entries(self) -> dict[str, int]:
        """Return the number of entries of every int32 tensor, by name."""
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


def training_shape(facts: Facts, reader: ReaderConfig, rows: int) -> BatchCapacities:
    """Return the shape of a training micro-batch of ``rows`` rows."""
    packed = reader.format == "packed"
    return BatchCapacities(
        tokens=rows * facts.max_sequence_length,
        sequences=rows * (facts.max_sequences_per_pack if packed else 1),
        masked=rows * (facts.max_masked_per_row if packed else facts.max_masked_per_sequence),
        row_length=facts.max_sequence_length,
    )


def evaluation_shape(facts: Facts, rows: int) -> BatchCapacities:
    """Return the shape of an evaluation batch: single sequences back to back in a buffer of ``rows`` rows."""
    return BatchCapacities(
        tokens=rows * facts.max_sequence_length,
        sequences=rows * facts.max_sequences_per_pack,
        masked=rows * max(facts.max_masked_per_row, facts.max_masked_per_sequence),
        row_length=facts.max_sequence_length,
    )


def collate(
    pieces: Sequence[Sequences], shape: BatchCapacities, dropout_seed: int, pin_memory: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch with the sequences of all ``pieces``, in that order.

    Args:
        pieces: at least one piece, already checked by :mod:`benchmarks.bert.shards`.
        dropout_seed: seed of this micro-batch, in [0, 2**63).
        pin_memory: use pinned memory, which allows asynchronous copies to the device.

    Raises:
        DataError: the sequences exceed the capacities of ``shape``.
    """
    every = pieces[0] if len(pieces) == 1 else concatenate(pieces)
    lengths = every.lengths.astype(np.int64)
    count, tokens, masked = len(lengths), len(every.input_ids), len(every.masked_lm_ids)
    _require_capacity(lengths, tokens, masked, shape)
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


def example_lengths(shape: BatchCapacities, count: int | None = None) -> list[int]:
    """Return lengths of synthetic sequences that fill the rows of ``shape``.

    Args:
        count: number of sequences: at least one per row, at most ``shape.sequences``. Default: the mix of the real
            set if rows hold up to three sequences (1 in 21 rows has two, half of the others three), else one per row.
    """
    rows, per_row = shape.tokens // shape.row_length, shape.sequences // (shape.tokens // shape.row_length)
    if count is None:
        twos = round(rows / 21) if per_row > 2 else 0
        threes = (rows - twos) // 2 if per_row > 2 else 0
        of_row = [1] * (rows - twos - threes) + [2] * twos + [3] * threes
    else:
        of_row = [count // rows + (row < count % rows) for row in range(rows)]
    return [
        shape.row_length // sequences + (number < shape.row_length % sequences)
        for sequences in of_row
        for number in range(sequences)
    ]


def example(shape: BatchCapacities, vocabulary: int, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return synthetic tensors of ``shape``: random tokens in sequences of ``lengths``, about 15 % of them masked."""
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


def _require_capacity(lengths: NDArray[np.int64], tokens: int, masked: int, shape: BatchCapacities) -> None:
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
    shape: BatchCapacities, dropout_seed: int, pin_memory: bool
) -> tuple[dict[str, Tensor], dict[str, NDArray[np.int32]]]:
    """Return zeroed tensors, and numpy arrays that share their memory."""
    entries = shape.entries()
    # one allocation for all tensors, because allocating pinned memory is expensive
    buffer = torch.empty(_SEED_ENTRIES + sum(entries.values()), dtype=torch.int32, pin_memory=pin_memory)
    buffer.numpy().fill(0)  # zeroing with torch would start its thread pool and wait for the slowest thread
    parts = buffer[_SEED_ENTRIES:].split(list(entries.values()))
    tensors = dict(zip(entries, parts, strict=True))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    seed = buffer[:_SEED_ENTRIES].view(torch.int64)
    seed.numpy()[0] = dropout_seed
    return {**tensors, "dropout_seed": seed[0]}, arrays
