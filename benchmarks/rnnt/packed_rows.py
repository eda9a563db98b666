"""Packed rows of a micro-batch: all pairs of frame and token position of all utterances, without padding.

Utterance b has frames_b * (tokens_b + 1) consecutive rows, frame by frame, and within a frame one for each token
position. Only the device knows the number of rows; memory is reserved for ``capacity`` rows.

Legend: B utterances, S frames, U tokens, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedRows(NamedTuple):
    """Rows of a micro-batch.

    Attributes:
        frames_B, tokens_B: frames and tokens of each utterance, int32, on the device.
        offsets: first row of each utterance, followed by the number of rows; (B + 1,) int64, on the device.
        capacity: rows for which memory is reserved.
        most_frames, most_tokens: padded frames and tokens.
    """

    frames_B: Tensor
    tokens_B: Tensor
    offsets: Tensor
    capacity: int
    most_frames: int
    most_tokens: int

    @property
    def utterances(self) -> int:
        """Number of utterances of the micro-batch."""
        return len(self.frames_B)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.offsets.device


def packed_rows(
    frames_B: Tensor, tokens_B: Tensor, most_frames: int, most_tokens: int, capacity: int | None = None
) -> PackedRows:
    """Return the row layout of a micro-batch; capturable.

    If a batch has more rows than ``capacity``, all its utterances are treated as having no frames, which makes the
    loss infinite. So nothing is written beyond the reserved memory, and the error becomes visible.

    Args:
        frames_B: joined frames of each utterance, 0 to ``most_frames``.
        tokens_B: tokens of each utterance, 0 to ``most_tokens``.
        capacity: rows to reserve memory for; None: the maximum for these numbers.
    """
    most = len(frames_B) * most_frames * (most_tokens + 1)
    capacity = most if capacity is None else min(capacity, most)
    ends_B = (frames_B.long() * (tokens_B.long() + 1)).cumsum(0)
    fits = ends_B[-1:] <= capacity
    offsets = torch.nn.functional.pad(ends_B * fits, (1, 0))
    frames_B = (frames_B * fits).to(torch.int32)
    return PackedRows(frames_B, tokens_B.to(torch.int32), offsets, capacity, most_frames, most_tokens)


class ReservedRows(NamedTuple):
    """Meaning of each reserved row.

    Attributes:
        utterance_R, frame_R, token_R: indices for each row, int64; arbitrary but valid for unused rows.
        exists_R: whether the row is used.
    """

    utterance_R: Tensor
    frame_R: Tensor
    token_R: Tensor
    exists_R: Tensor


def row_indices(rows: PackedRows) -> ReservedRows:
    """Return utterance, frame and token position of every reserved row."""
    row_R = torch.arange(rows.capacity, device=rows.device)
    exists_R = row_R < rows.offsets[-1]
    utterance_R = torch.searchsorted(rows.offsets[1:], row_R, right=True).clamp_(max=rows.utterances - 1)
    own_R = (row_R - rows.offsets[utterance_R]).masked_fill(~exists_R, 0)
    width_R = rows.tokens_B.long()[utterance_R] + 1
    return ReservedRows(utterance_R, own_R // width_R, own_R % width_R, exists_R)
