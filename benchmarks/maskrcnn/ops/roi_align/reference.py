"""Reference of :mod:`benchmarks.maskrcnn.ops.roi_align`, and code that both implementations share.

Shapes: B pictures, R regions of a picture, N regions of all pictures, C channels, S bins along each side, K samples of
a bin along each side, P cells of all levels and pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 4
"""Number of pyramid levels from which regions are taken."""
_CANONICAL_SIZE, _CANONICAL_STRIDE = 224, 16
"""A region of size 224 px is taken from the level of stride 16."""
_EPSILON = 1e-6
_CORNERS = 4


class Regions(NamedTuple):
    """Regions of one head.

    Attributes:
        boxes_BR4: corners, px of the padded pictures, fp32.
        there_BR: bool; False for slots without a region, whose box can have any value.
        resolution: number of bins along each side, S.
    """

    boxes_BR4: Tensor
    there_BR: Tensor
    resolution: int


RoiAlign = Callable[[Sequence[Tensor], Sequence[Regions], Sequence[int], int], tuple[Tensor, ...]]
"""Signature: ``roi_align(levels, regions, strides, samples)``; see :func:`roi_align_reference`."""


def check(levels: Sequence[Tensor], regions: Sequence[Regions], strides: Sequence[int], most: int) -> None:
    """Check the arguments.

    Raises:
        ValueError: there are not four levels of the same pictures and channels, each with a stride; the regions belong
            to other pictures; or the number of sets is not 1 ... ``most``.
    """
    shapes = [tuple(level.shape) for level in levels]
    if len(levels) != LEVELS or len(strides) != LEVELS or len({shape[:2] for shape in shapes}) != 1:
        raise ValueError(f"levels {shapes} with strides {list(strides)}: {LEVELS} of the same pictures and channels")
    if not 1 <= len(regions) <= most:
        raise ValueError(f"{len(regions)} sets of regions; 1 to {most} share a pass")
    for boxes_BR4, there_BR, _ in regions:
        if boxes_BR4.shape != (shapes[0][0], there_BR.shape[-1], 4) or there_BR.shape != boxes_BR4.shape[:2]:
            raise ValueError(
                f"boxes {tuple(boxes_BR4.shape)} and slots {tuple(there_BR.shape)} of {shapes[0][0]} pictures"
            )


def least_areas(strides: Sequence[int]) -> list[float]:
    """Return the smallest area in px^2 of the regions of each level but the first.

    This is ``4 + log2(sqrt(area) / 224 + 1e-6) >= level``, solved for the area: a logarithm could be rounded
    differently on each device.
    """
    return [(_CANONICAL_SIZE * (stride / _CANONICAL_STRIDE - _EPSILON)) ** 2 for stride in strides[1:]]


def level_of(boxes_BR4: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the index of each region's level, (B, R) int64."""
    x1_BR, y1_BR, x2_BR, y2_BR = boxes_BR4.unbind(2)
    area_BR = (x2_BR - x1_BR + 1) * (y2_BR - y1_BR + 1)
    level_BR = torch.zeros_like(area_BR, dtype=torch.int64)
    for least in least_areas(strides):
        level_BR += area_BR >= least
    return level_BR


def _along(first_BR: Tensor, last_BR: Tensor, size_BR: Tensor, bins: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return the cells that samples interpolate along one axis, and their weights.

    Args:
        first_BR, last_BR: ends of the regions, in cells of their levels.
        size_BR: sizes of the levels, in cells.
        bins: bins of a region.
        samples: samples of a bin.

    Returns:
        (B, R, S, K, 2) each: the cells before and after each sample, and their weights, 0 outside the level.
    """
    bin_BR11 = ((last_BR - first_BR).clamp(min=1) / bins)[..., None, None]
    whole_S1 = torch.arange(bins, device=first_BR.device, dtype=first_BR.dtype).unsqueeze(1)
    part_K = (torch.arange(samples, device=first_BR.device, dtype=first_BR.dtype) + 0.5) / samples
    at_BRSK = first_BR[..., None, None] + (whole_S1 + part_K) * bin_BR11
    size_BR11 = size_BR[..., None, None].to(at_BRSK.dtype)
    inside_BRSK = (at_BRSK >= -1) & (at_BRSK <= size_BR11)
    at_BRSK = torch.where(inside_BRSK, torch.minimum(at_BRSK.clamp(min=0), size_BR11 - 1), 0.0)
    before_BRSK = at_BRSK.floor()
    behind_BRSK = torch.minimum(before_BRSK + 1, size_BR11 - 1)
    share_BRSK = at_BRSK - before_BRSK
    weight_BRSK2 = torch.stack([1 - share_BRSK, share_BRSK], -1) * inside_BRSK.unsqueeze(-1)
    return torch.stack([before_BRSK, behind_BRSK], -1).long(), weight_BRSK2


def _joined(levels: Sequence[Tensor]) -> Tensor:
    """Return the channels of all cells, level by level, and a last row of zeros: (P + 1, C), fp32 (or fp64)."""
    sum_dtype = torch.promote_types(levels[0].dtype, torch.float32)
    rows = [level.permute(0, 2, 3, 1).flatten(0, 2).to(sum_dtype) for level in levels]
    return torch.cat([*rows, rows[0].new_zeros((1, rows[0].shape[1]))])


def _aligned(
    rows_PC: Tensor, levels: Sequence[Tensor], regions: Regions, strides: Sequence[int], samples: int
) -> Tensor:
    """Return the features of one set of regions, (B R, C, S, S), in the dtype of the rows."""
    boxes_BR4, there_BR, bins = regions
    pictures, device = len(boxes_BR4), rows_PC.device
    boxes_BR4 = torch.where(there_BR.unsqueeze(2), boxes_BR4, 0).to(rows_PC.dtype)
    level_BR = level_of(boxes_BR4, strides)
    start = 0
    start_BR, height_BR, width_BR = (torch.zeros_like(level_BR) for _ in range(3))
    scale_BR = torch.zeros_like(boxes_BR4[..., 0])
    for index, (level, stride) in enumerate(zip(levels, strides, strict=True)):
        height, width = level.shape[2:]
        own_BR = level_BR == index
        picture_B1 = torch.arange(pictures, device=device).unsqueeze(1)
        start_BR = torch.where(own_BR, start + picture_B1 * (height * width), start_BR)
        height_BR, width_BR = torch.where(own_BR, height, height_BR), torch.where(own_BR, width, width_BR)
        scale_BR = torch.where(own_BR, 1 / stride, scale_BR)
        start += pictures * height * width
    x1_BR, y1_BR, x2_BR, y2_BR = (boxes_BR4 * scale_BR.unsqueeze(2)).unbind(2)
    y_BRSK2, y_weight_BRSK2 = _along(y1_BR, y2_BR, height_BR, bins, samples)
    x_BRSK2, x_weight_BRSK2 = _along(x1_BR, x2_BR, width_BR, bins, samples)
    row_BRSK2 = y_BRSK2 * width_BR[:, :, None, None, None] + start_BR[:, :, None, None, None]
    y_weight_BRSK2 = y_weight_BRSK2 * there_BR[:, :, None, None, None] / samples**2
    # (B, R, S, S, K, K, 2, 2): cells that the samples of a bin interpolate, rows before columns
    cell = row_BRSK2[:, :, :, None, :, None, :, None] + x_BRSK2[:, :, None, :, None, :, None, :]
    weight = y_weight_BRSK2[:, :, :, None, :, None, :, None] * x_weight_BRSK2[:, :, None, :, None, :, None, :]
    nowhere = len(rows_PC) - 1
    seen = _CORNERS * samples**2
    features = F.embedding_bag(
        torch.where(weight != 0, cell, nowhere).reshape(-1, seen), rows_PC,
        per_sample_weights=weight.reshape(-1, seen), mode="sum", padding_idx=nowhere,
    )  # fmt: skip
    return features.view(-1, bins, bins, rows_PC.shape[1]).permute(0, 3, 1, 2)


def roi_align_reference(
    levels: Sequence[Tensor], regions: Sequence[Regions], strides: Sequence[int], samples: int
) -> tuple[Tensor, ...]:
    """Return the features of all regions.

    Args:
        levels: the four finest levels of the pyramid, (B, C, H, W) each.
        regions: sets of regions of the same pictures.
        strides: px between cells of each level.
        samples: samples of a bin along each side.

    Returns:
        For each set the mean of every bin's bilinear samples, (B R, C, S, S), channels_last, sorted by picture, in the
        dtype of the levels. Arithmetic is fp32, or fp64 for fp64 levels.

    Raises:
        ValueError: the shapes don't fit.
    """
    check(levels, regions, strides, most=len(regions))
    rows_PC = _joined(levels)
    return tuple(_aligned(rows_PC, levels, own, strides, samples).to(levels[0].dtype) for own in regions)
