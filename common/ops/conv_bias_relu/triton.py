"""Epilogue of a convolution and gradient before ReLU, with Triton kernels.

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
"""Tiles by pass."""


def channels_last(x_NCHW: Tensor) -> Tensor:
    """Return the tensor in channels_last, as a copy only if it has another format."""
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def epilogue_(y_NCHW: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, relu: bool) -> Tensor:
    """Apply bias, residual and ReLU to the result of a convolution and return it. In place if it is channels_last."""
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
    """Return the gradient before ReLU (``dy_NCHW`` itself without ReLU), and that of the bias in fp32 or None."""
    dy_NCHW = channels_last(dy_NCHW)
    if y_NCHW is None and not needs_bias:
        return dy_NCHW, None
    dz_NCHW = dy_NCHW if y_NCHW is None else torch.empty_like(dy_NCHW)
    y_MC = None if y_NCHW is None else channels_last_rows(channels_last(y_NCHW))
    rows = (channels_last_rows(dy_NCHW), y_MC, channels_last_rows(dz_NCHW))
    return dz_NCHW, relu_gradient(TILES["gradient"], *rows, summed=needs_bias)
