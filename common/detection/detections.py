"""What a network found in the pictures of an evaluation: on the device at fixed shapes, then as columns on the host.

Shapes: B pictures of a batch, S pictures of a rank, K detections of a picture at most, D detections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.distributed.layout import Layout

_FARTHEST = 1e30
"""Px, in place of infinity; areas in fp64 stay finite."""
PADDING = -1
"""In the place of a picture's id: the slot of the batch holds none."""


@dataclass(frozen=True)
class Found:
    """Detections of a batch.

    Attributes:
        box: (B, K, 4) x, y, width, height in pixels of the picture as it was read, fp32.
        score: (B, K) fp32.
        class_id: (B, K) int64.
        there: (B, K) whether there is one, bool; the other slots hold anything.
    """

    box: Tensor
    score: Tensor
    class_id: Tensor
    there: Tensor


def in_picture(corners_BK4: Tensor, height: float, width: float, size_B2: Tensor) -> Tensor:
    """Boxes x, y, width, height in pixels of the pictures as they were read. Capturable.

    Args:
        corners_BK4: x1, y1, x2, y2 in a resized picture.
        height, width: of the resized pictures.
        size_B2: height and width of the pictures as they were read.

    Returns:
        (B, K, 4), always finite, since scores have no place for others: a box whose decoding overflowed, of a network
        that diverged or has not learnt yet, becomes one that finds nothing.
    """
    height_B1, width_B1 = size_B2.float().split(1, 1)
    scale_y_B1, scale_x_B1 = height_B1 / height, width_B1 / width
    x1, y1, x2, y2 = corners_BK4.float().unbind(2)
    x1, y1, x2, y2 = x1 * scale_x_B1, y1 * scale_y_B1, x2 * scale_x_B1, y2 * scale_y_B1
    return torch.stack([x1, y1, x2 - x1, y2 - y1], 2).nan_to_num_(0.0, _FARTHEST, -_FARTHEST)


class DetectionBuffer:
    """The detections of a rank's part of the evaluation set, kept on the device until all of it has been seen.

    Args:
        layout: ranks that share the set, along ``dp``.
        keep: K.
    """

    def __init__(self, layout: Layout, keep: int) -> None:
        self._layout, self._keep = layout, keep
        self._rows: Tensor | None = None
        self._pictures: Tensor | None = None
        self._filled = 0

    def begin(self, pictures: int) -> None:
        """Begin an evaluation of ``pictures`` slots on this rank, padding included; equal on all ranks."""
        if self._pictures is None or len(self._pictures) != pictures:
            device = self._layout.device
            # x, y, width, height, score, class; classes are exact in fp32. A missing one has the class PADDING.
            self._rows = torch.empty((pictures, self._keep, 6), dtype=torch.float32, device=device)
            self._pictures = torch.empty(pictures, dtype=torch.int64, device=device)
        self._filled = 0

    def add(self, picture_B: Tensor, found: Found) -> None:
        """Keep the detections of a batch of pictures, which are given by id; waits for nothing."""
        assert self._rows is not None, "begin comes first"
        assert self._pictures is not None
        part = slice(self._filled, self._filled + len(picture_B))
        kept = found.score.shape[1]
        rows = self._rows[part]
        class_BK = torch.where(found.there, found.class_id, PADDING)
        rows[:, kept:, 5] = PADDING
        rows[:, :kept, :4] = found.box
        rows[:, :kept, 4] = found.score
        rows[:, :kept, 5] = class_BK.to(rows.dtype)
        self._pictures[part] = picture_B
        self._filled += len(picture_B)

    def columns(self) -> dict[str, NDArray[Any]] | None:
        """All ranks' pictures and detections on the first rank of ``dp``, None on the others; waits for the device.

        Collective.

        Returns:
            ``pictures`` (P,): ids of all pictures that were seen; ``picture_id`` (D,) and ``class_id`` (D,), int64;
            ``box`` (D, 4) and ``score`` (D,), fp32. Padding and missing detections are not among them.
        """
        assert self._rows is not None
        assert self._pictures is not None
        rows, pictures = _gathered(self._rows, self._layout), _gathered(self._pictures, self._layout)
        if rows is None or pictures is None:
            return None
        pictures_P, rows_PK6 = pictures.cpu().numpy(), rows.cpu().numpy()
        real_P = pictures_P != PADDING
        pictures_P, rows_PK6 = pictures_P[real_P], rows_PK6[real_P]
        there_PK = rows_PK6[:, :, 5] != PADDING
        rows_D6 = rows_PK6[there_PK]
        return {
            "pictures": pictures_P,
            "picture_id": np.repeat(pictures_P, there_PK.sum(1)),
            "class_id": rows_D6[:, 5].astype(np.int64),
            "box": np.ascontiguousarray(rows_D6[:, :4]),
            "score": np.ascontiguousarray(rows_D6[:, 4]),
        }

    def close(self) -> None:
        """Give the memory back."""
        self._rows = self._pictures = None


def _gathered(part: Tensor, layout: Layout) -> Tensor | None:
    """The parts of all ranks of ``dp`` behind one another, on the first of them; None on the others."""
    group = layout.group("dp")
    if group is None:
        return part
    first = layout.index("dp") == 0
    parts = [torch.empty_like(part) for _ in range(layout.size("dp"))] if first else None
    dist.gather(part, parts, group=group, group_dst=0)
    return torch.cat(parts) if parts is not None else None
