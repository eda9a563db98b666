"""Reference of :mod:`benchmarks.maskrcnn.ops.paste`: one detection at a time in numpy, on the CPU.

Legend: D detections, S rows and columns of a mask, H W height and width of a box inside its picture, T runs of all
detections. Tensors on a GPU are waited for and copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.maskrcnn.ops.paste.masks import Masks


@torch.no_grad()
def count_runs_reference(masks: Masks, threshold: float) -> Tensor:
    """Return the number of runs of each detection's mask in its whole picture. Reference implementation.

    Args:
        masks: masks of D detections.
        threshold: probability above which a pixel belongs to the object.

    Returns:
        (D,) int32; 0 for slots without a detection.
    """
    counts = [0 if ends is None else len(ends) for ends in _ends(masks, threshold)]
    return torch.tensor(counts, dtype=torch.int32, device=masks.there_D.device)


@torch.no_grad()
def write_ends_reference(masks: Masks, threshold: float, first_D: Tensor, ends_T: Tensor) -> None:
    """Write the end of each run, counting the picture's pixels column by column. Reference implementation.

    Args:
        masks: masks of D detections.
        threshold: threshold with which the runs were counted.
        first_D: int64, index in ``ends_T`` of each detection's first run.
        ends_T: int32; receives the number of pixels up to the end of each run. The last one of a detection is the area
            of its picture.
    """
    for first, ends in zip(first_D.tolist(), _ends(masks, threshold), strict=True):
        if ends is not None:
            ends_T[first : first + len(ends)] = torch.from_numpy(ends)


def _ends(masks: Masks, threshold: float) -> Iterator[NDArray[np.int32] | None]:
    """Yield the run ends of each detection, or None for slots without a detection."""
    padded_DSS = functional.pad(masks.probability_DSS.float(), (1, 1, 1, 1)).cpu().numpy()
    there_D = masks.there_D.cpu().numpy()
    corners_D4 = _grown(np.where(there_D[:, None], masks.boxes_D4.cpu().numpy(), 0), masks.probability_DSS.shape[1])
    size_D2 = masks.size_D2.cpu().numpy().astype(np.int32)
    for place, there in enumerate(there_D):
        yield _ends_of(padded_DSS[place], corners_D4[place], size_D2[place], threshold) if there else None


def _grown(boxes_D4: NDArray[np.float32], size: int) -> NDArray[np.int32]:
    """Return integer corners of the boxes including the border."""
    half = np.float32(0.5)
    extent = (boxes_D4[:, 2:] - boxes_D4[:, :2]) * half * np.float32((size + 2) / size)
    middle = (boxes_D4[:, 2:] + boxes_D4[:, :2]) * half
    return np.concatenate([middle - extent, middle + extent], 1).astype(np.int32)


def _ends_of(
    padded_SS: NDArray[np.float32], corners: NDArray[np.int32], size: NDArray[np.int32], threshold: float
) -> NDArray[np.int32]:
    height, width = size.tolist()
    x1, y1, x2, y2 = corners.tolist()
    left, right = max(x1, 0), min(x2 + 1, width)
    top, bottom = max(y1, 0), min(y2 + 1, height)
    if right <= left or bottom <= top:
        return np.array([height * width], np.int32)
    across = _between(np.arange(left - x1, right - x1), x2 - x1 + 1, len(padded_SS))
    down = _between(np.arange(top - y1, bottom - y1), y2 - y1 + 1, len(padded_SS))
    rows_SW = across.share * padded_SS[:, across.first] + across.rest * padded_SS[:, across.second]
    mask_HW = down.share[:, None] * rows_SW[down.first] + down.rest[:, None] * rows_SW[down.second]

    columns_WH = np.zeros((right - left, height), np.bool_)
    columns_WH[:, top:bottom] = (mask_HW > np.float32(threshold)).T
    pixels = np.concatenate([[False], columns_WH.ravel(), [False]])
    ends = np.flatnonzero(pixels[1:] != pixels[:-1]) + left * height
    area = height * width
    return np.concatenate([ends[ends < area], [area]]).astype(np.int32)


class _Between(NamedTuple):
    """Two rows or columns of a mask, and their weights, for each row or column of a box."""

    first: NDArray[np.int32]
    second: NDArray[np.int32]
    share: NDArray[np.float32]
    rest: NDArray[np.float32]


def _between(place: NDArray[np.int64], extent: int, size: int) -> _Between:
    """Return the mask rows or columns for positions in a box of ``extent`` px, as in PyTorch's interpolation."""
    half, one = np.float32(0.5), np.float32(1)
    real = np.maximum(np.float32(size) / np.float32(extent) * (place.astype(np.float32) + half) - half, np.float32(0))
    first = np.minimum(real.astype(np.int32), size - 1)
    rest = real - first.astype(np.float32)
    return _Between(first, np.minimum(first + 1, size - 1), one - rest, rest)
