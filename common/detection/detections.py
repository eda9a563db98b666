"""What a network found in the pictures of an evaluation: on the device at fixed shapes, then as columns on the host.

Shapes: B pictures of a batch, P pictures, K detections of a picture at most, D detections, S height and width of a
mask within its box.
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
"""Px, in place of infinity; areas in fp64 stay finite."""
PADDING = -1
"""In the place of a picture's id: the slot of the batch holds none."""


RunLengths = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""How masks become runs.

Called with (D, S, S) probabilities, (D, 4) corners, (D, 2) heights and widths of the pictures and (D,) whether there is
a mask. Returns how many runs each has, (D,) int32, 0 where there is none, and all runs, int32: how many pixels outside,
inside, outside and so on follow each other, column by column of the whole picture.
"""


@dataclass(frozen=True)
class FoundMasks:
    """Where the objects of a batch are within their boxes.

    Attributes:
        corners: (B, K, 4) x1, y1, x2, y2 in pixels of the picture as it was read, fp32.
        probability: (B, K, S, S) that a cell of the box belongs to the object.
        size: (B, 2) height and width of the pictures as they were read.
    """

    corners: Tensor
    probability: Tensor
    size: Tensor


@dataclass(frozen=True)
class Found:
    """Detections of a batch.

    Attributes:
        box: (B, K, 4) x, y, width, height in pixels of the picture as it was read, fp32.
        score: (B, K) fp32.
        class_id: (B, K) int64.
        there: (B, K) whether there is one, bool; the other slots hold anything.
        masks: None of a network that finds boxes alone.
    """

    box: Tensor
    score: Tensor
    class_id: Tensor
    there: Tensor
    masks: FoundMasks | None = None


def corners_in_picture(corners_BK4: Tensor, height: float | Tensor, width: float | Tensor, size_B2: Tensor) -> Tensor:
    """Corners x1, y1, x2, y2 in pixels of the pictures as they were read. Capturable.

    Args:
        corners_BK4: in a resized picture.
        height, width: of the resized pictures; of each, (B, 1), where they differ.
        size_B2: height and width of the pictures as they were read.

    Returns:
        (B, K, 4), fp32, always finite, since scores have no place for others: a box whose decoding overflowed, of a
        network that diverged or has not learnt yet, becomes one that finds nothing.
    """
    height_B1, width_B1 = size_B2.float().split(1, 1)
    scale_y_B1, scale_x_B1 = height_B1 / height, width_B1 / width
    x1, y1, x2, y2 = corners_BK4.float().unbind(2)
    scaled = torch.stack([x1 * scale_x_B1, y1 * scale_y_B1, x2 * scale_x_B1, y2 * scale_y_B1], 2)
    return scaled.nan_to_num_(0.0, _FARTHEST, -_FARTHEST)


def as_origin_and_size(corners_BK4: Tensor, pixel: float = 0.0) -> Tensor:
    """Boxes x, y, width, height of finite corners; a box from x1 to x2 is x2 - x1 + ``pixel`` wide. Capturable."""
    x1, y1, x2, y2 = corners_BK4.unbind(2)
    return torch.stack([x1, y1, x2 - x1 + pixel, y2 - y1 + pixel], 2)


def in_picture(corners_BK4: Tensor, height: float, width: float, size_B2: Tensor) -> Tensor:
    """Boxes x, y, width, height in pixels of the pictures as they were read; see :func:`corners_in_picture`."""
    return as_origin_and_size(corners_in_picture(corners_BK4, height, width, size_B2))


class DetectionBuffer:
    """The detections of a rank's part of the evaluation set, kept on the device until all of it has been seen.

    Args:
        layout: ranks that share the set, along ``dp``.
        keep: K.
        run_lengths: of detections with masks, how these become runs; None where there are none.
    """

    def __init__(self, layout: Layout, keep: int, run_lengths: RunLengths | None = None) -> None:
        self._layout, self._keep, self._run_lengths = layout, keep, run_lengths
        self._rows: Tensor | None = None
        self._pictures: Tensor | None = None
        self._masks: FoundMasks | None = None
        self._filled = 0

    def begin(self, pictures: int) -> None:
        """Begin an evaluation of ``pictures`` slots on this rank, padding included; equal on all ranks."""
        if self._pictures is None or len(self._pictures) != pictures:
            device = self._layout.device
            # x, y, width, height, score, class; classes are exact in fp32. A missing one has the class PADDING.
            self._rows = torch.empty((pictures, self._keep, 6), dtype=torch.float32, device=device)
            self._pictures = torch.empty(pictures, dtype=torch.int64, device=device)
            self._masks = None
        self._filled = 0

    def add(self, picture_B: Tensor, found: Found) -> None:
        """Keep the detections of a batch of pictures, which are given by id; waits for nothing."""
        assert self._rows is not None, "begin comes first"
        assert self._pictures is not None
        part = slice(self._filled, self._filled + len(picture_B))
        kept = found.score.shape[1]
        rows = self._rows[part]
        class_BK = torch.where(found.there & (picture_B != PADDING).unsqueeze(1), found.class_id, PADDING)
        rows[:, kept:, 5] = PADDING
        rows[:, :kept, :4] = found.box
        rows[:, :kept, 4] = found.score
        rows[:, :kept, 5] = class_BK.to(rows.dtype)
        self._pictures[part] = picture_B
        if self._run_lengths is not None:
            assert found.masks is not None, "the network finds masks"
            masks = self._room_for(found.masks)
            masks.corners[part, :kept] = found.masks.corners
            masks.probability[part, :kept] = found.masks.probability
            masks.size[part] = found.masks.size
        self._filled += len(picture_B)

    def columns(self) -> dict[str, NDArray[Any]] | None:
        """All ranks' pictures and detections on the first rank of ``dp``, None on the others; waits for the device.

        Collective.

        Returns:
            ``pictures`` (P,): ids of all pictures that were seen; ``picture_id`` (D,) and ``class_id`` (D,), int64;
            ``box`` (D, 4) and ``score`` (D,), fp32. Padding and missing detections are not among them. Of masks also
            ``run_count`` (D,), how many runs each has, and ``runs``, all of them, int32.
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
        there_PK = rows_PK6[:, :, 5] != PADDING
        rows_D6 = rows_PK6[there_PK]
        columns = {
            "pictures": pictures_P,
            "picture_id": np.repeat(pictures_P, there_PK.sum(1)),
            "class_id": rows_D6[:, 5].astype(np.int64),
            "box": np.ascontiguousarray(rows_D6[:, :4]),
            "score": np.ascontiguousarray(rows_D6[:, 4]),
        }
        if runs is not None:
            count_PK, all_runs = runs
            columns |= {"run_count": count_PK[real_P][there_PK], "runs": all_runs}
        return columns

    def close(self) -> None:
        """Give the memory back."""
        self._rows = self._pictures = self._masks = None

    def _room_for(self, masks: FoundMasks) -> FoundMasks:
        """Where masks such as these are kept."""
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
        """Number of runs of every slot of all ranks, (P, K), and all runs, on the first rank; None without masks."""
        if self._run_lengths is None:
            return None
        assert self._rows is not None
        assert self._masks is not None, "add comes first"
        masks, there_PK = self._masks, self._rows[:, :, 5] != PADDING
        count_D, runs = self._run_lengths(
            masks.probability.flatten(0, 1),
            masks.corners.flatten(0, 1),
            masks.size.repeat_interleave(self._keep, 0),
            there_PK.flatten(),
        )
        every_count, every_run = (
            _gathered(count_D.view_as(there_PK), self._layout),
            _gathered_ragged(runs, self._layout),
        )
        if every_count is None or every_run is None:
            return None
        return every_count.cpu().numpy(), every_run.cpu().numpy()


def _gathered(part: Tensor, layout: Layout) -> Tensor | None:
    """The parts of all ranks of ``dp`` behind one another, on the first of them; None on the others."""
    group = layout.group("dp")
    if group is None:
        return part
    first = layout.index("dp") == 0
    parts = [torch.empty_like(part) for _ in range(layout.size("dp"))] if first else None
    dist.gather(part, parts, group=group, group_dst=0)
    return torch.cat(parts) if parts is not None else None


def _gathered_ragged(part: Tensor, layout: Layout) -> Tensor | None:
    """As :func:`_gathered`, of parts (N,) of different lengths; waits for the device."""
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
