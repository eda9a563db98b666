"""Packed rows that RNN-T's joint network and loss are measured with: those of utterances of LibriSpeech's lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.data_settings import RowStatistics
from benchmarks.rnnt.example import real_lengths
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.mlperf.fixed import fixed_facts

STATISTICS = RowStatistics(mean=13200.0, deviation=6900.0)
"""What the recipes for LibriSpeech have room by."""

SEED = 5
"""Of lengths, with which 192 utterances have 2.51 million rows."""


class BenchRows(NamedTuple):
    """A made-up micro-batch.

    Attributes:
        rows: with the room of training.
        tokens_BU: random.
        used: how many rows there are.
        facts: of the network.
    """

    rows: PackedRows
    tokens_BU: Tensor
    used: int
    facts: Facts


def bench_rows(utterances: int, device: torch.device) -> BenchRows:
    """The longest utterance first."""
    facts = fixed_facts(Facts, "rnnt")
    lengths = real_lengths(utterances, facts, np.random.default_rng(SEED))
    frames_B, tokens_B = (lengths.frames_B + 1) // 2, lengths.tokens_B
    most_frames, most_tokens = int(frames_B.max()), int(tokens_B.max())
    capacity = STATISTICS.capacity(utterances, (2 * most_frames, most_tokens))
    frames, tokens = (torch.from_numpy(each).to(device) for each in (frames_B, tokens_B))
    rows = packed_rows(frames, tokens, most_frames, most_tokens, capacity)
    drawn_BU = torch.randint(facts.blank, (utterances, most_tokens), device=device, dtype=torch.int32)
    return BenchRows(rows, drawn_BU, int((frames_B * (tokens_B + 1)).sum()), facts)
