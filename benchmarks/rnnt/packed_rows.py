"""Where the rows of a micro-batch's utterances lie: (b, s, u) of all of them back to back, without padding.

Utterance b has frames_b * (tokens_b + 1) rows, frame by frame, and within a frame one for each number of tokens that
came before. How many rows there are is known on the device alone; memory is reserved for ``capacity``.

Legend: B utterances, S frames, U tokens, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedRows(NamedTuple):
    """Rows of a micro-batch.

    Attributes:
        frames_B, tokens_B: of each utterance, int32, on the device.
        offsets: first row of each utterance, and behind the last one their number; (B + 1,) int64, on the device.
        capacity: rows that memory is reserved for.
        most_frames, most_tokens: what utterances are padded to.
    """

    frames_B: Tensor
    tokens_B: Tensor
    offsets: Tensor
    capacity: int
    most_frames: int
    most_tokens: int

    @property
    def utterances(self) -> int:
        """Of the micro-batch."""
        return len(self.frames_B)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.offsets.device


def packed_rows(
    frames_B: Tensor, tokens_B: Tensor, most_frames: int, most_tokens: int, capacity: int | None = None
) -> PackedRows:
    """Lay out the rows of a micro-batch; capturable.

    A batch that has more rows than ``capacity`` counts as one whose utterances have no frames, for which the loss is
    infinite: nothing is written beyond the reserved memory, and nothing wrong passes unnoticed.

    Args:
        frames_B: frames of each utterance, after two are joined to one; integers, 0 ... most_frames.
        tokens_B: tokens of each, 0 ... most_tokens.
        most_frames, most_tokens: what utterances are padded to.
        capacity: rows to reserve memory for; as many as these numbers allow unless told otherwise.
    """
    most = len(frames_B) * most_frames * (most_tokens + 1)
    capacity = most if capacity is None else min(capacity, most)
    ends_B = (frames_B.long() * (tokens_B.long() + 1)).cumsum(0)
    fits = ends_B[-1:] <= capacity
    offsets = torch.nn.functional.pad(ends_B * fits, (1, 0))
    frames_B = (frames_B * fits).to(torch.int32)
    return PackedRows(frames_B, tokens_B.to(torch.int32), offsets, capacity, most_frames, most_tokens)


class Places(NamedTuple):
    """What each of the reserved rows is.

    Attributes:
        utterance_R, frame_R, token_R: of each row, int64; some utterance's, frame's and number where there is none.
        exists_R: whether it is in use, bool.
    """

    utterance_R: Tensor
    frame_R: Tensor
    token_R: Tensor
    exists_R: Tensor


def places(rows: PackedRows) -> Places:
    """Utterance, frame and tokens before it, of every row."""
    row_R = torch.arange(rows.capacity, device=rows.device)
    exists_R = row_R < rows.offsets[-1]
    utterance_R = torch.searchsorted(rows.offsets[1:], row_R, right=True).clamp_(max=rows.utterances - 1)
    own_R = (row_R - rows.offsets[utterance_R]).masked_fill(~exists_R, 0)
    width_R = rows.tokens_B.long()[utterance_R] + 1
    return Places(utterance_R, own_R // width_R, own_R % width_R, exists_R)
