"""What surrounds a convolution, through the Triton kernels of :mod:`common.ops.conv_bias_relu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Tensors are channels_last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.conv_bias_relu import kernels
from common.ops.tile import Tile
from common.ops.tiling.relu_gradient import relu_gradient
from common.ops.tiling.tiles import channels_last_rows, cut

TILES: dict[str, Tile] = {
    "epilogue": Tile(columns=64, elements=4096, warps=4, programs=8, stages=2),
    "gradient": Tile(columns=64, elements=4096, warps=4, programs=4, stages=2),
}
"""Pass to its tile."""


def channels_last(x_NCHW: Tensor) -> Tensor:
    """The tensor in channels_last, a copy only where its memory is otherwise."""
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def epilogue_(y_NCHW: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, relu: bool) -> Tensor:
    """Bias, residual and ReLU behind a convolution without them, in the memory of its result, which is returned."""
    y_NCHW = channels_last(y_NCHW)
    if y_NCHW.numel():
        residual = y_NCHW if residual_NCHW is None else channels_last(residual_NCHW)
        pictures, channels, height, width = y_NCHW.shape
        rows = pictures * height * width
        grid, arguments = cut(TILES["epilogue"], 1, rows, channels, y_NCHW.device, reverse=False)
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
    y_MC = None if y_NCHW is None else channels_last_rows(channels_last(y_NCHW))
    rows = (channels_last_rows(dy_NCHW), y_MC, channels_last_rows(dz_NCHW))
    return dz_NCHW, relu_gradient(TILES["gradient"], *rows, summed=needs_bias)
