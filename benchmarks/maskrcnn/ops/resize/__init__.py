"""Resize decoded pictures to a batch: mirrored, blue first, minus the mean, and zero outside the pictures.

Resizing is bilinear between pixel centres, first along the width, then along the height, with weights in units of
2**-22 and Pillow's rounding to levels. For enlarged pictures, the levels are bit-identical to ``Image.resize``. For
reduced pictures they are not, because Pillow then widens its filter. This is not implemented, since no picture of COCO
is reduced.

Shapes: B pictures in slots of S x S px, H x W px of the batch, L rows or columns (lines) of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

WEIGHT_BITS = 22
"""Fractional bits of Pillow's weights: ``PRECISION_BITS`` in its Resample.c."""


class Taps(NamedTuple):
    """The two source lines that are interpolated for each line of the result.

    Attributes:
        first_BL, second_BL: indices of the source lines, int64; equal at the border.
        near_BL, far_BL: weights of both, int32, in units of 2**-22.
    """

    first_BL: Tensor
    second_BL: Tensor
    near_BL: Tensor
    far_BL: Tensor


def taps_of(lines: int, decoded_B: Tensor, size_B: Tensor, mirrored_B: Tensor | None = None) -> Taps:
    """Return the source lines of each result line, in float64 as in Pillow. Lines after ``size_B`` have no meaning.

    Args:
        lines: L.
        decoded_B: lines of the source, int32.
        size_B: lines after resizing.
        mirrored_B: whether to reverse the order of the lines.
    """
    decoded_B1, size_B1 = decoded_B.long().unsqueeze(1), size_B.double().unsqueeze(1)
    position_BL = torch.minimum(torch.arange(lines, dtype=torch.float64, device=size_B.device), size_B1 - 1)
    if mirrored_B is not None:
        position_BL = torch.where(mirrored_B.unsqueeze(1), size_B1 - 1 - position_BL, position_BL)
    center_BL = (position_BL + 0.5) * (decoded_B1.double() / size_B1)
    first_BL = ((center_BL - 1) + 0.5).long().clamp(min=0)
    end_BL = torch.minimum(((center_BL + 1) + 0.5).long(), decoded_B1)
    near_BL = _triangle((first_BL - center_BL) + 0.5)
    far_BL = torch.where(first_BL + 1 < end_BL, _triangle((first_BL + 1 - center_BL) + 0.5), 0.0)
    whole_BL = near_BL + far_BL
    weights = [(share_BL / whole_BL * 2**WEIGHT_BITS + 0.5).int() for share_BL in (near_BL, far_BL)]
    return Taps(first_BL, torch.minimum(first_BL + 1, decoded_B1 - 1), *weights)


def resize_reference(
    pixels_BSS3: Tensor,
    decoded_size_B2: Tensor,
    size_B2: Tensor,
    mirrored_B: Tensor,
    mean: tuple[float, float, float],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the batch of resized pictures: (B, 3, H, W), blue first, channels_last.

    Args:
        pixels_BSS3: uint8 levels, red first; each picture at the top left of its slot.
        decoded_size_B2: height and width of the source pictures, px, int32, 1 ... S.
        size_B2: height and width after resizing, px, whole numbers in fp32, at least 1 and within ``shape``.
        mirrored_B: bool, whether a picture is mirrored left to right.
        mean: mean levels of blue, green and red.
        shape: H and W.
    """
    height, width = shape
    columns = taps_of(width, decoded_size_B2[:, 1], size_B2[:, 1], mirrored_B)
    rows = taps_of(height, decoded_size_B2[:, 0], size_B2[:, 0])
    wide_BSW3 = _between(pixels_BSS3.int(), columns, 2)
    levels_BHW3 = _between(wide_BSW3, rows, 1).flip(3)
    below_BH = torch.arange(height, device=size_B2.device) >= size_B2[:, :1]
    beside_BW = torch.arange(width, device=size_B2.device) >= size_B2[:, 1:]
    beyond_BHW = below_BH.unsqueeze(2) | beside_BW.unsqueeze(1)
    image_BHW3 = torch.stack([levels_BHW3[..., channel].float() - level for channel, level in enumerate(mean)], 3)
    return image_BHW3.masked_fill(beyond_BHW.unsqueeze(3), 0.0).to(dtype).permute(0, 3, 1, 2)


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _between(levels_BXY3: Tensor, taps: Taps, dim: int) -> Tensor:
    """Return int32 levels, interpolated along ``dim`` with ``taps``."""
    along = [len(taps.first_BL), 1, 1, 1]
    along[dim] = taps.first_BL.shape[1]
    wanted = list(levels_BXY3.shape)
    wanted[dim] = along[dim]
    first, second = (line_BL.view(along).expand(wanted) for line_BL in (taps.first_BL, taps.second_BL))
    near, far = (weight_BL.view(along) for weight_BL in (taps.near_BL, taps.far_BL))
    # The sum of the weights is 2**22 or differs by one, so that 255 times it fits int32 and rounds to 255 at most.
    total = levels_BXY3.gather(dim, first) * near + levels_BXY3.gather(dim, second) * far
    return (total + 2 ** (WEIGHT_BITS - 1)) >> WEIGHT_BITS


RESIZE = Operation(
    "resize",
    resize_reference,
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.resize.triton:resize"),
    },
    kernel_names=(("resize", r"^resize_"),),
    cases="benchmarks.maskrcnn.ops.resize.cases",
)
"""Signature: ``resize(pixels_BSS3, decoded_size_B2, size_B2, mirrored_B, mean, shape, dtype)``.

The dtype of a request is that of the batch.
"""
