"""Packed rows and outputs of both networks, for the cases of RNN-T's joint network and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.data_settings import RowStatistics
from benchmarks.rnnt.example import Lengths, real_lengths
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Draw

FACTS = fixed_facts(Facts, "rnnt")

UTTERANCES = 192
"""Utterances of a micro-batch."""

STATISTICS = RowStatistics(mean=13200.0, deviation=6900.0)
"""Distribution of the rows of an utterance. The recipes for LibriSpeech derive the capacity from it."""

SEED = 5
"""Seed of the lengths. With it, 192 utterances have 2.51 million rows."""

SPARE = 3
"""Unused rows at the end of the capacity, where the lengths of utterances are given."""


class CaseRows(NamedTuple):
    """A synthetic micro-batch.

    Attributes:
        used: number of rows that exist.
    """

    rows: PackedRows
    used: int


def case_rows(utterances: int | Sequence[tuple[int, int]], device: torch.device) -> CaseRows:
    """Return the rows of a micro-batch.

    Args:
        utterances: number of utterances, with the lengths of LibriSpeech, the longest first, and the capacity of
            training; or the frames and tokens of each utterance.
    """
    if isinstance(utterances, int):
        lengths = real_lengths(utterances, FACTS, np.random.default_rng(SEED))
        frames_B, tokens_B = (lengths.frames_B + 1) // 2, lengths.tokens_B
        padding = 0
    else:
        frames_B, tokens_B = Lengths(*np.array(utterances, dtype=np.int64).T)
        padding = 1
    most_frames, most_tokens = int(frames_B.max()) + padding, int(tokens_B.max()) + padding
    used = int((frames_B * (tokens_B + 1)).sum())
    capacity = used + SPARE if padding else STATISTICS.capacity(len(frames_B), (2 * most_frames, most_tokens))
    frames, tokens = (torch.from_numpy(each).to(device) for each in (frames_B, tokens_B))
    return CaseRows(packed_rows(frames, tokens, most_frames, most_tokens, capacity), used)


def tokens_of(rows: PackedRows, classes: int, draw: Draw) -> Tensor:
    """Return tokens as int32, (B, U). Blanks, which must not be read, follow the tokens of each utterance."""
    tokens_BU = draw.integers(0, classes - 1, rows.utterances, rows.most_tokens, dtype=torch.int32)
    position_U = torch.arange(rows.most_tokens, device=draw.device)
    return tokens_BU.masked_fill_(position_U >= rows.tokens_B[:, None], classes - 1)


def networks(rows: PackedRows, width: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return outputs f of the encoder and g of the prediction network. Padding is NaN."""
    f_SBH = draw.normal(rows.most_frames, rows.utterances, width)
    g_NBH = draw.normal(rows.most_tokens + 1, rows.utterances, width)
    for x, behind_B in ((f_SBH, rows.frames_B), (g_NBH, rows.tokens_B + 1)):
        x.masked_fill_((torch.arange(len(x), device=draw.device)[:, None] >= behind_B)[:, :, None], torch.nan)
    return f_SBH, g_NBH
