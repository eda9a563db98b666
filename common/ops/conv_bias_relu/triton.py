"""What surrounds a convolution, through the Triton kernels of :mod:`common.ops.conv_bias_relu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Tensors are channels_last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.conv_bias_relu import kernels
from common.ops.tiling.column_sums import column_sums
from common.ops.tiling.tiles import Cut, Tile, cut

TILES: dict[str, Tile] = {"epilogue": Tile(64, 4096, 4, 8, 2), "gradient": Tile(64, 4096, 4, 4, 2)}
"""Pass to its tile. ``bench --sweep`` times others."""


def channels_last(x_NCHW: Tensor) -> Tensor:
    """The tensor in channels_last, a copy only where its memory is otherwise."""
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def _cut(key: str, y_NCHW: Tensor) -> tuple[Cut, int, int]:
    """Launch of a pass over all rows, and how many rows and columns these are."""
    pictures, channels, height, width = y_NCHW.shape
    rows = pictures * height * width
    return cut(TILES[key], 1, rows, channels, y_NCHW.device, reverse=False), rows, channels


def epilogue_(y_NCHW: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, relu: bool) -> Tensor:
    """Bias, residual and ReLU behind a convolution without them, in the memory of its result, which is returned."""
    y_NCHW = channels_last(y_NCHW)
    if y_NCHW.numel():
        residual = y_NCHW if residual_NCHW is None else channels_last(residual_NCHW)
        (grid, arguments), rows, channels = _cut("epilogue", y_NCHW)
        kernels.conv_epilogue_kernel[grid](
            y_NCHW, bias_C.contiguous(), residual, rows, channels,
            ADDED=residual_NCHW is not None, RELU=relu, **arguments,
        )  # fmt: skip
    return y_NCHW


def masked(dy_NCHW: Tensor, y_NCHW: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient in front of the ReLU, which is ``dy_NCHW`` itself without one, and the bias's in fp32."""
    dy_NCHW = channels_last(dy_NCHW)
    if y_NCHW is None and not needs_bias:
        return dy_NCHW, None
    dz_NCHW = dy_NCHW if y_NCHW is None else torch.empty_like(dy_NCHW)
    (grid, arguments), rows, channels = _cut("gradient", dy_NCHW)
    partial = dy_NCHW.new_empty((grid[0] if needs_bias else 0, channels), dtype=torch.float32)
    kernels.conv_masked_gradient_kernel[grid](
        dy_NCHW, dy_NCHW if y_NCHW is None else channels_last(y_NCHW), dz_NCHW, partial, rows, channels,
        MASKED=y_NCHW is not None, SUMMED=needs_bias, **arguments,
    )  # fmt: skip
    return dz_NCHW, column_sums(partial, torch.float32) if needs_bias else None
