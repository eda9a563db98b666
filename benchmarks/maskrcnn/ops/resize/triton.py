"""Resize with the Triton kernel of :mod:`benchmarks.maskrcnn.ops.resize.kernels`, with one launch per batch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.maskrcnn.ops.resize import kernels
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"resize": Tile(values=512, rows=8, warps=4)}
"""``values``: channel values of a row that a program writes at a time; ``rows``: rows of a picture per program."""


@torch.no_grad()
def resize(
    pixels_BSS3: Tensor,
    decoded_size_B2: Tensor,
    size_B2: Tensor,
    mirrored_B: Tensor,
    mean: tuple[float, float, float],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Triton implementation, bit-identical to :func:`benchmarks.maskrcnn.ops.resize.reference.resize_reference`.

    Raises:
        ValueError: an input is not contiguous.
    """
    require_contiguous(pixels_BSS3=pixels_BSS3, decoded_size_B2=decoded_size_B2, size_B2=size_B2, mirrored_B=mirrored_B)
    pictures, side = pixels_BSS3.shape[:2]
    height, width = shape
    image_BHW3 = torch.empty((pictures, height, width, 3), dtype=dtype, device=pixels_BSS3.device)
    if image_BHW3.numel():
        tile = TILES["resize"]
        grid = triton.cdiv(3 * width, tile.values), triton.cdiv(height, tile.rows), pictures
        kernels.resize_kernel[grid](
            pixels_BSS3, decoded_size_B2, size_B2, mirrored_B, image_BHW3, side, height, width, *mean,
            BLOCK=tile.values, ROWS=tile.rows, num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return image_BHW3.permute(0, 3, 1, 2)
