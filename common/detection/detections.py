"""Detections of a network in an evaluation: on the device at fixed shapes, then as columns on the host.

Shapes: B pictures of a batch, P pictures, K largest number of detections of a picture, D detections, S height and
width of a mask within its box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.distributed.layout import Layout

_FARTHEST = 1e30
"""Replacement for infinite coordinates, px; areas in fp64 stay finite."""
PADDING = -1
"""Picture id of an empty slot of a batch."""


RunLengths = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that converts masks to runs.

Called with (D, S, S) probabilities, (D, 4) corners, (D, 2) heights and widths of the pictures and (D,) whether there
is a mask. Returns the number of runs of each mask, (D,) int32, 0 without a mask; and all runs, int32: numbers of
pixels alternately outside and inside, column by column of the whole picture.
"""


@dataclass(frozen=True)
class FoundMasks:
    """Masks of the objects of a batch within their boxes.

    Attributes:
        corners: (B, K, 4) x1, y1, x2, y2 in pixels of the original picture, fp32.
        probability: (B, K, S, S) probability that a cell of the box belongs to the object.
        size: (B, 2) height and width of the original pictures.
    """

    corners: Tensor
    probability: Tensor
    size: Tensor


@dataclass(frozen=True)
class Found:
    """Detections of a batch.

    Attributes:
        box: (B, K, 4) x, y, width, height in pixels of the original picture, fp32.
        score: (B, K) fp32.
        class_id: (B, K) int64.
        valid: (B, K) whether the slot has a detection, bool; other slots have arbitrary values.
        masks: masks; None for a network that finds only boxes.
    """

    box: Tensor
    score: Tensor
    class_id: Tensor
    valid: Tensor
    masks: FoundMasks | None = None


def corners_in_picture(corners_BK4: Tensor, height: float | Tensor, width: float | Tensor, size_B2: Tensor) -> Tensor:
    """Return corners x1, y1, x2, y2 in pixels of the original pictures. Capturable.

    Args:
        corners_BK4: corners in a resized picture.
        height, width: size of the resized pictures; (B, 1) if it differs.
        size_B2: height and width of the original pictures.

    Returns:
        (B, K, 4), fp32, always finite, because scoring refuses other values. A box whose decoding overflowed, because
            the network diverged or is untrained, becomes a box that matches nothing.
    """
    height_B1, width_B1 = size_B2.float().split(1, 1)
    scale_y_B1, scale_x_B1 = height_B1 / height, width_B1 / width
    x1, y1, x2, y2 = corners_BK4.float().unbind(2)
    scaled = torch.stack([x1 * scale_x_B1, y1 * scale_y_B1, x2 * scale_x_B1, y2 * scale_y_B1], 2)
    return scaled.nan_to_num_(0.0, _FARTHEST, -_FARTHEST)


def as_origin_and_size(corners_BK4: Tensor, pixel: float = 0.0) -> Tensor:
    """Return boxes (B, K, 4), x, y, width, height, of finite corners; width is x2 - x1 + ``pixel``. Capturable."""
    x1, y1, x2, y2 = corners_BK4.unbind(2)
    return torch.stack([x1, y1, x2 - x1 + pixel, y2 - y1 + pixel], 2)


def in_picture(corners_BK4: Tensor, height: float, width: float, size_B2: Tensor) -> Tensor:
    """Return boxes (B, K, 4), x, y, width, height, in pixels of the original pictures.

    See :func:`corners_in_picture`.
    """
    return as_origin_and_size(corners_in_picture(corners_BK4, height, width, size_B2))


class DetectionBuffer:
    """Buffer on the device for the detections of a rank's part of the evaluation set.

    Args:
        layout: ranks that share the set, along ``dp``.
        run_lengths: converts masks to runs; None if there are no masks.
    """

    def __init__(self, layout: Layout, keep: int, run_lengths: RunLengths | None = None) -> None:
        self._layout, self._keep, self._run_lengths = layout, keep, run_lengths
        self._rows: Tensor | None = None
        self._pictures: Tensor | None = None
        self._masks: FoundMasks | None = None
        self._filled = 0

    def begin(self, pictures: int) -> None:
        """Begin an evaluation of ``pictures`` slots on this rank, including padding; equal on all ranks."""
        if self._pictures is None or len(self._pictures) != pictures:
            device = self._layout.device
            # x, y, width, height, score, class; classes are exact in fp32. A missing detection has class PADDING.
            self._rows = torch.empty((pictures, self._keep, 6), dtype=torch.float32, device=device)
            self._pictures = torch.empty(pictures, dtype=torch.int64, device=device)
            self._masks = None
        self._filled = 0

    def add(self, picture_B: Tensor, found: Found) -> None:
        """Store the detections of a batch; ``picture_B`` has the ids of the pictures. Does not wait for the device."""
        assert self._rows is not None, "begin comes first"
        assert self._pictures is not None
        part = slice(self._filled, self._filled + len(picture_B))
        kept = found.score.shape[1]
        rows = self._rows[part]
        class_BK = torch.where(found.valid & (picture_B != PADDING).unsqueeze(1), found.class_id, PADDING)
        rows[:, kept:, 5] = PADDING
        rows[:, :kept, :4] = found.box
        rows[:, :kept, 4] = found.score
        rows[:, :kept, 5] = class_BK.to(rows.dtype)
        self._pictures[part] = picture_B
        if self._run_lengths is not None:
            assert found.masks is not None, "the network finds masks"
            masks = self._mask_buffer(found.masks)
            masks.corners[part, :kept] = found.masks.corners
            masks.probability[part, :kept] = found.masks.probability
            masks.size[part] = found.masks.size
        self._filled += len(picture_B)

    def columns(self) -> dict[str, NDArray[Any]] | None:
        """Return the pictures and detections of all ranks on the first rank of ``dp``, None on the others.

        Collective; waits for the device.

        Returns:
            ``pictures`` (P,): ids of all evaluated pictures; ``picture_id`` (D,) and ``class_id`` (D,), int64;
                ``box`` (D, 4) and ``score`` (D,), fp32. Padding and missing detections are left out. With masks also
                ``run_count`` (D,), the number of runs of each mask, and ``runs``, all runs, int32.
        """
        assert self._rows is not None
        assert self._pictures is not None
        runs = self._gathered_runs()
        rows, pictures = _gathered(self._rows, self._layout), _gathered(self._pictures, self._layout)
        if rows is None or pictures is None:
            return None
        pictures_P, rows_PK6 = pictures.cpu().numpy(), rows.cpu().numpy()
        real_P = pictures_P != PADDING
        pictures_P, rows_PK6 = pictures_P[real_P], rows_PK6[real_P]
        valid_PK = rows_PK6[:, :, 5] != PADDING
        rows_D6 = rows_PK6[valid_PK]
        columns = {
            "pictures": pictures_P,
            "picture_id": np.repeat(pictures_P, valid_PK.sum(1)),
            "class_id": rows_D6[:, 5].astype(np.int64),
            "box": np.ascontiguousarray(rows_D6[:, :4]),
            "score": np.ascontiguousarray(rows_D6[:, 4]),
        }
        if runs is not None:
            count_PK, all_runs = runs
            columns |= {"run_count": count_PK[real_P][valid_PK], "runs": all_runs}
        return columns

    def close(self) -> None:
        """Free the memory."""
        self._rows = self._pictures = self._masks = None

    def _mask_buffer(self, masks: FoundMasks) -> FoundMasks:
        """Return the mask buffer; allocate it at the first call."""
        if self._masks is None:
            assert self._rows is not None
            pictures, side = len(self._rows), masks.probability.shape[2:]
            self._masks = FoundMasks(
                masks.corners.new_zeros((pictures, self._keep, 4)),
                masks.probability.new_zeros((pictures, self._keep, *side)),
                masks.size.new_zeros((pictures, 2)),
            )
        return self._masks

    def _gathered_runs(self) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Return the number of runs of each slot of all ranks, (P, K), and all runs, on the first rank; else None."""
        if self._run_lengths is None:
            return None
        assert self._rows is not None
        assert self._masks is not None, "add comes first"
        masks, valid_PK = self._masks, self._rows[:, :, 5] != PADDING
        count_D, runs = self._run_lengths(
            masks.probability.flatten(0, 1),
            masks.corners.flatten(0, 1),
            masks.size.repeat_interleave(self._keep, 0),
            valid_PK.flatten(),
        )
        every_count, every_run = (
            _gathered(count_D.view_as(valid_PK), self._layout),
            _gathered_ragged(runs, self._layout),
        )
        if every_count is None or every_run is None:
            return None
        return every_count.cpu().numpy(), every_run.cpu().numpy()


def _gathered(part: Tensor, layout: Layout) -> Tensor | None:
    """Return the parts of all ranks of ``dp``, concatenated, on the first of them; None on the others."""
    group = layout.group("dp")
    if group is None:
        return part
    first = layout.index("dp") == 0
    parts = [torch.empty_like(part) for _ in range(layout.size("dp"))] if first else None
    dist.gather(part, parts, group=group, group_dst=0)
    return torch.cat(parts) if parts is not None else None


def _gathered_ragged(part: Tensor, layout: Layout) -> Tensor | None:
    """Do the same as :func:`_gathered` for parts (N,) of different lengths; wait for the device."""
    group = layout.group("dp")
    if group is None:
        return part
    length = torch.tensor([len(part)], device=part.device)
    lengths = [torch.empty_like(length) for _ in range(layout.size("dp"))]
    dist.all_gather(lengths, length, group=group)
    counts = torch.cat(lengths).tolist()
    padded = part.new_zeros(max(counts))
    padded[: len(part)] = part
    gathered = _gathered(padded.unsqueeze(0), layout)
    return None if gathered is None else torch.cat([row[:count] for row, count in zip(gathered, counts, strict=True)])
