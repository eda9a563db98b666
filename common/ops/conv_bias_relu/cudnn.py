# mypy: allow-untyped-defs
"""Convolution with cuDNN, with a fused epilogue if cuDNN supports it, otherwise with one in Triton.

PyTorch's ``cudnn_convolution_relu`` and ``cudnn_convolution_add_relu`` apply bias, residual and ReLU to the
accumulators of the convolution; the former passes its own output to cuDNN as a residual times 0. They do not support
groups, channels that are not multiples of 8, or an epilogue without ReLU. In these cases the epilogue is one pass over
the result (by PyTorch if it is only a bias).

Tensors are channels_last. For the kernels a result is V = N H W rows of C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from common.ops.conv_bias_relu import ConvolutionPasses, Shape, apply
from common.ops.relu_gradient import relu_gradient
from common.ops.tile import Tile
from common.ops.tiling import channels_last_rows, cut, load_row, load_tile, own_columns, store_tile, tile_at


@triton.jit
def conv_epilogue_kernel(
    y_ptr,  # (V, C), changed in place
    bias_ptr,  # (C,)
    residual_ptr,  # (V, C), read if ADDED
    V, C,
    ADDED: tl.constexpr, RELU: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write y + bias + residual, after ReLU if RELU. Grid (programs, ceil(C / BLOCK_C), 1)."""
    column, inside = own_columns(1, C, BLOCK_C)
    bias = load_row(bias_ptr, column, inside)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        y = load_tile(y_ptr + base, offset, mask, EVEN) + bias
        if ADDED:
            y += load_tile(residual_ptr + base, offset, mask, EVEN)
        if RELU:
            y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        store_tile(y_ptr + base, offset, y, mask, EVEN)


TILES: dict[str, Tile] = {
    "epilogue": Tile(columns=64, elements=4096, warps=4, programs=8, stages=2),
    "gradient": Tile(columns=64, elements=4096, warps=4, programs=4, stages=2),
}
"""Tiles by pass."""


def channels_last(x_NCHW: Tensor) -> Tensor:
    """Return the tensor in channels_last, as a copy only if it has another format."""
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def epilogue_(y_NCHW: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, relu: bool) -> Tensor:
    """Add bias and residual to the result of a convolution, apply ReLU if ``relu``, and return it.

    It is changed in place if it is channels_last.
    """
    y_NCHW = channels_last(y_NCHW)
    if y_NCHW.numel():
        residual = y_NCHW if residual_NCHW is None else channels_last(residual_NCHW)
        pictures, channels, height, width = y_NCHW.shape
        rows = pictures * height * width
        grid, arguments = cut(TILES["epilogue"], 1, rows, channels, y_NCHW.device, reverse=False)
        conv_epilogue_kernel[grid](
            y_NCHW, bias_C.contiguous(), residual, rows, channels,
            ADDED=residual_NCHW is not None, RELU=relu, **arguments,
        )  # fmt: skip
    return y_NCHW


def masked(dy_NCHW: Tensor, y_NCHW: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return dy where y > 0, else 0 (dy itself if y is None), and its sums (C,) in fp32.

    The sums are the gradient of the bias; they are None unless ``needs_bias``.
    """
    dy_NCHW = channels_last(dy_NCHW)
    if y_NCHW is None and not needs_bias:
        return dy_NCHW, None
    dz_NCHW = dy_NCHW if y_NCHW is None else torch.empty_like(dy_NCHW)
    y_MC = None if y_NCHW is None else channels_last_rows(channels_last(y_NCHW))
    rows = (channels_last_rows(dy_NCHW), y_MC, channels_last_rows(dz_NCHW))
    return dz_NCHW, relu_gradient(TILES["gradient"], *rows, summed=needs_bias)


_CHANNELS = 8
"""Divisor of the input and output channels of convolutions with a fused epilogue."""


def forward(
    x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, shape: Shape, relu: bool
) -> Tensor:
    """Return ``conv(x, weight) + bias + residual``, (N, C out, H, W), with ReLU if ``relu``.

    One fused kernel of cuDNN computes it if possible, otherwise a convolution and a second pass.
    """
    x_NCHW = channels_last(x_NCHW)
    channels_fit = weight.shape[0] % _CHANNELS == weight.shape[1] % _CHANNELS == 0
    if x_NCHW.is_cuda and relu and shape.groups == 1 and channels_fit:
        rest = ([shape.stride] * 2, [shape.padding] * 2, [1, 1], shape.groups)
        if residual_NCHW is None:
            return torch.cudnn_convolution_relu(x_NCHW, weight, bias_C, *rest)
        return torch.cudnn_convolution_add_relu(x_NCHW, weight, residual_NCHW, 1.0, bias_C, *rest)
    bias_only = residual_NCHW is None and not relu
    y_NCHW = F.conv2d(x_NCHW, weight, bias_C if bias_only else None, shape.stride, shape.padding, groups=shape.groups)
    return y_NCHW if bias_only else epilogue_(y_NCHW, bias_C, residual_NCHW, relu)


PASSES = ConvolutionPasses(forward, masked)


def conv_bias_relu(
    x_NCHW: Tensor,
    weight: Tensor,
    bias_C: Tensor,
    stride: int,
    padding: int,
    groups: int,
    relu: bool,
    residual_NCHW: Tensor | None = None,
) -> Tensor:
    """Return ``relu(conv(x, weight) + bias + residual)``, (N, C out, H, W); ReLU only if ``relu``.

    See :func:`common.ops.conv_bias_relu.conv_bias_relu_reference`.
    """
    return apply(PASSES, x_NCHW, weight, bias_C, Shape(stride, padding, groups), relu, residual_NCHW)
