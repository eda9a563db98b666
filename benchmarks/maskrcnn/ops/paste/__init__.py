"""Virtual paste: detection masks as COCO's run lengths in the published picture, without drawing the picture.

The steps of the rules for a detection, in fp32 as in the reference: Pad the S x S probabilities with a border of one
zero. Enlarge the box around its centre by (S + 2) / S. Truncate its corners to integers. Resize the probabilities to
the width and height of the box, which are x2 - x1 + 1 etc. and at least 1, bilinearly between half-pixel centres. Set
pixels above the threshold to 1. Place the result in a picture of zeros and clip it.

A run-length code counts alternating runs of zeros and ones, column by column, beginning with zeros. A run ends where a
pixel differs from the previous one. This can happen only at the pixels of the box and at the pixel below each of its
columns, so that no other pixel is visited, and no bitmap is stored.

The first pass counts the runs of each detection, and the second writes their ends at offsets that are sums of the
counts. So all detections share one buffer, and the host waits once, for its size.

Products and sums are not fused, so that the reference and the Triton kernels are bit-identical. PyTorch's resize on
CPUs fuses them if the CPU can and differs in the last bit: pixels within 2e-7 of the threshold can change.

The reference computes one detection at a time in numpy on the CPU, to which it copies tensors of a GPU.

Shapes: D detections, S rows and columns of a mask, H W height and width of a box inside its picture, T runs of all
detections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


class Masks(NamedTuple):
    """Masks of detections from the network.

    Attributes:
        probability_DSS: probabilities of the predicted class, fp32, fp16 or bf16.
        boxes_D4: fp32 corners in the published picture, px.
        size_D2: height and width of the published picture, px; whole numbers of any dtype.
        there_D: bool, False for slots without a detection.
    """

    probability_DSS: Tensor
    boxes_D4: Tensor
    size_D2: Tensor
    there_D: Tensor


class MaskRuns(NamedTuple):
    """Run lengths of many masks, one mask after another.

    Attributes:
        counts_D: int32, number of runs; 0 for slots without a detection, otherwise at least 1.
        runs_T: int32, lengths in px of alternating runs of zeros and ones, zeros first. The sum for a mask is the area
            of its picture.
    """

    counts_D: Tensor
    runs_T: Tensor


class Paste(NamedTuple):
    """The two passes of an implementation, which take masks and the threshold of their probabilities.

    Attributes:
        count_runs: returns the number of runs of each detection, (D,) int32.
        write_ends: takes the index of each detection's first run, (D,) int64, and fills (T,) int32 with the run ends.
    """

    count_runs: Callable[[Masks, float], Tensor]
    write_ends: Callable[[Masks, float, Tensor, Tensor], None]


@torch.no_grad()
def find_runs(
    paste: Paste, threshold: float, probability_DSS: Tensor, boxes_D4: Tensor, size_D2: Tensor, there_D: Tensor
) -> MaskRuns:
    """Return the run lengths of all detections in their whole pictures. Waits once for the device: for the sum of runs.

    Args:
        threshold: probability above which a pixel belongs to the object.
        probability_DSS, boxes_D4, size_D2, there_D: see :class:`Masks`; detections of any number of pictures.
    """
    masks = Masks(probability_DSS, boxes_D4, size_D2, there_D)
    counts_D = paste.count_runs(masks, threshold)
    end_D = counts_D.long().cumsum(0)
    total = int(end_D[-1]) if len(end_D) else 0
    first_D = end_D - counts_D
    ends_T = torch.empty(total, dtype=torch.int32, device=counts_D.device)
    paste.write_ends(masks, threshold, first_D, ends_T)
    begins_T = torch.zeros(total + 1, dtype=torch.bool, device=counts_D.device)
    # A detection without runs has the first run of the next one, or ``total``, hence one more element.
    begins_T.index_fill_(0, first_D, True)
    before_T = torch.where(begins_T[:-1], 0, ends_T.roll(1))
    return MaskRuns(counts_D, ends_T - before_T)


@torch.no_grad()
def count_runs_reference(masks: Masks, threshold: float) -> Tensor:
    """Return the number of runs of each detection's mask in its whole picture.

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
    """Write the end of each run, counting the picture's pixels column by column.

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
    for index, there in enumerate(there_D):
        yield _ends_of(padded_DSS[index], corners_D4[index], size_D2[index], threshold) if there else None


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


def _between(position: NDArray[np.int64], extent: int, size: int) -> _Between:
    """Return the mask rows or columns for positions in a box of ``extent`` px, as in PyTorch's interpolation."""
    half, one = np.float32(0.5), np.float32(1)
    real = np.maximum(
        np.float32(size) / np.float32(extent) * (position.astype(np.float32) + half) - half, np.float32(0)
    )
    first = np.minimum(real.astype(np.int32), size - 1)
    rest = real - first.astype(np.float32)
    return _Between(first, np.minimum(first + 1, size - 1), one - rest, rest)


PASTE = Operation(
    "paste",
    Paste(count_runs_reference, write_ends_reference),
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.paste.triton"),
    },
    kernel_names=(("paste", r"^paste_"),),
    cases="benchmarks.maskrcnn.ops.paste.cases",
)
"""Functions of :class:`Paste`:

``count_runs(masks, threshold)`` returns (D,) int32;
``write_ends(masks, threshold, first_D, ends_T)`` fills ``ends_T``, int32.
"""
