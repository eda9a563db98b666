"""Grouped 3x3 convolutions through the Triton kernels of :mod:`common.ops.conv_bias_relu.grouped_kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Tensors are channels_last. Convolutions
that the kernels are not written for run as :mod:`common.ops.conv_bias_relu.cudnn` has them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.conv_bias_relu import cudnn, grouped_kernels
from common.ops.conv_bias_relu.reference import Passes, Shape, apply, convolution_gradients, grouped_3x3
from common.ops.conv_bias_relu.triton import channels_last, masked
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

_FEWEST_CHANNELS = 16
"""That the matrix units take."""


TILES: dict[str, Tile] = {
    "forward": Tile(places=128, channels=32, warps=4, programs=0),
    "input": Tile(places=128, channels=32, warps=4, programs=0),
    "weight": Tile(places=128, channels=32, warps=4, programs=4),
}
"""Pass to its tile: of the convolution, and of the gradients of x and the weight.

``places``: places of a tile; ``channels``: channels of a program, at least those of a group.
"""


def _block(tile: Tile, channels: int, width: int) -> int:
    """Channels of a program, for groups of ``width``."""
    return max(min(tile.channels, triton.next_power_of_2(channels)), width, _FEWEST_CHANNELS)


def _packed(weight: Tensor, block: int, transposed: bool) -> Tensor:
    """The weight as matrices of blocks of channels."""
    channels, width = weight.shape[:2]
    blocks = triton.cdiv(channels, block)
    packed = weight.new_empty((blocks, 9, block, block))
    grouped_kernels.grouped_pack_kernel[blocks, 9](
        weight, packed, channels, *weight.stride(), G=width, TRANSPOSED=transposed, BLOCK_C=block, num_warps=4
    )
    return packed


def _convolve(key: str, x_NCHW: Tensor, weight: Tensor, y_NCHW: Tensor, stride: int, extra: dict[str, Any]) -> Tensor:
    """Fill ``y_NCHW`` with the convolution of x, or of the other direction."""
    tile, transposed = TILES[key], key == "input"
    pictures, channels, height, width = y_NCHW.shape
    block = _block(tile, channels, weight.shape[1])
    parities = stride if transposed else 1
    places = pictures * triton.cdiv(height, parities) * triton.cdiv(width, parities)
    grid = (triton.cdiv(channels, block) * triton.cdiv(places, tile.places), parities**2)
    pointers = {name: extra.get(name, y_NCHW) for name in ("bias_ptr", "residual_ptr")}
    grouped_kernels.grouped_convolution_kernel[grid](
        x_NCHW, _packed(weight, block, transposed), **pointers, y_ptr=y_NCHW,
        N=pictures, H_X=x_NCHW.shape[2], W_X=x_NCHW.shape[3], H_Y=height, W_Y=width, C=channels,
        STRIDE=stride, TRANSPOSED=transposed,
        BIASED="bias_ptr" in extra, ADDED="residual_ptr" in extra, RELU=extra.get("relu", False),
        BLOCK_P=tile.places, BLOCK_C=block, num_warps=tile.warps,
    )  # fmt: skip
    return y_NCHW


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def forward(
    x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, shape: Shape, relu: bool
) -> Tensor:
    """The convolution and all that follows it in one kernel."""
    if not grouped_3x3(weight.shape, shape):
        return cudnn.fused_forward(x_NCHW, weight, bias_C, residual_NCHW, shape, relu)
    x_NCHW = channels_last(x_NCHW)
    height, width = ((size - 1) // shape.stride + 1 for size in x_NCHW.shape[2:])
    extra: dict[str, Any] = {"bias_ptr": bias_C.contiguous(), "relu": relu}
    if residual_NCHW is not None:
        extra["residual_ptr"] = channels_last(residual_NCHW)
    y_NCHW = _empty((len(x_NCHW), len(weight), height, width), x_NCHW)
    return _convolve("forward", x_NCHW, weight, y_NCHW, shape.stride, extra)


def input_gradient(dz_NCHW: Tensor, x_shape: torch.Size, weight: Tensor, stride: int) -> Tensor:
    """Gradient of x."""
    return _convolve("input", channels_last(dz_NCHW), weight, _empty(tuple(x_shape), dz_NCHW), stride, {})


def weight_gradient(dz_NCHW: Tensor, x_NCHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Gradient of the weight: partial sums per program in fp32, then these in a fixed order."""
    dz_NCHW, x_NCHW = channels_last(dz_NCHW), channels_last(x_NCHW)
    tile = TILES["weight"]
    pictures, channels, height, width = dz_NCHW.shape
    group = weight.shape[1]
    block = _block(tile, channels, group)
    blocks, tiles = triton.cdiv(channels, block), triton.cdiv(pictures * height * width, tile.places)
    programs = min(tiles, max(1, multiprocessors(x_NCHW.device) * tile.programs // (3 * blocks)))
    partial = x_NCHW.new_empty((programs, channels * 9 * group), dtype=torch.float32)
    grouped_kernels.grouped_weight_kernel[blocks, programs, 3](
        dz_NCHW, x_NCHW, partial, pictures, *x_NCHW.shape[2:], height, width, channels,
        G=group, STRIDE=stride, BLOCK_P=tile.places, BLOCK_C=block, num_warps=tile.warps,
    )  # fmt: skip
    return partial.sum(0).to(weight.dtype).view(channels, 3, 3, group).permute(0, 3, 1, 2)


def gradients(
    dz_NCHW: Tensor, x_NCHW: Tensor, weight: Tensor, shape: Shape, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the weight."""
    if not grouped_3x3(weight.shape, shape):
        return convolution_gradients(dz_NCHW, x_NCHW, weight, shape, needs)
    dx_NCHW = input_gradient(dz_NCHW, x_NCHW.shape, weight, shape.stride) if needs[0] else None
    return dx_NCHW, weight_gradient(dz_NCHW, x_NCHW, weight, shape.stride) if needs[1] else None


PASSES = Passes(forward, masked, gradients)


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
    """See :func:`common.ops.conv_bias_relu.reference.conv_bias_relu_reference`."""
    return apply(PASSES, x_NCHW, weight, bias_C, Shape(stride, padding, groups), relu, residual_NCHW)
