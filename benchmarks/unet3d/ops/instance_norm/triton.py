"""Launches and autograd function of the kernels of :mod:`benchmarks.unet3d.ops.instance_norm.kernels`.

Activations in other formats are copied to channels_last_3d first. Shapes: N samples, V voxels, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.unet3d.ops.instance_norm import kernels, whole_volume
from common.distributed.spatial.split import VolumeSplit
from common.ops.norm.autograd import second_reader
from common.ops.norm.moments import moments_kernel
from common.ops.tile import Tile
from common.ops.tiling import Cut, block_of_columns, channels_last_rows, cut
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "moments": Tile(columns=64, elements=8192, warps=4, programs=2, stages=3),
    "normalise": Tile(columns=128, elements=4096, warps=8, programs=0, stages=1),
    "gradient_sums": Tile(columns=64, elements=4096, warps=4, programs=2, stages=3),
    "input_gradient": Tile(columns=128, elements=8192, warps=8, programs=0, stages=1),
}
"""Tile by pass."""

SMALL_TILES: dict[str, Tile] = {
    "forward": Tile(voxels=4096, elements=32768, columns=16, elements_per_warp=2048),
    "backward": Tile(voxels=1024, elements=16384, columns=16, elements_per_warp=1024),
}
"""Tile by direction. Backward holds two tensors, so its limit on the volume is lower.

- ``voxels``: largest volume that one program holds whole; larger ones take the three launches;
- ``elements``: most elements of a program, which limits its columns; ``columns``: most columns of a program;
- ``elements_per_warp``: elements per warp, which determines the number of warps.
"""

_MOST_WARPS = 16
_FEWEST_COLUMNS = 8
_HEAD = 16
_MERGE_COLUMNS = 8
_MERGE_SAMPLES = 16
_MERGE_INSTANCES = 128


def cut_small(tile: Tile, samples: int, voxels: int, channels: int) -> Cut:
    """Cut (samples, voxels, channels) into whole instances, several columns per program."""
    block_v = triton.next_power_of_2(voxels)
    most = max(_FEWEST_COLUMNS, min(tile.columns, tile.elements // block_v))
    block_c = block_of_columns(channels, most)
    warps = min(max(block_v * block_c // tile.elements_per_warp, 1), _MOST_WARPS)
    arguments = {
        "BLOCK_V": block_v,
        "BLOCK_C": block_c,
        "EVEN": voxels == block_v and channels % block_c == 0,
        "num_warps": warps,
    }
    return Cut((1, triton.cdiv(channels, block_c), samples), arguments)


def _sizes(x_NCDHW: Tensor) -> tuple[int, int, int]:
    """Return N, V, C."""
    samples, channels = x_NCDHW.shape[:2]
    return samples, x_NCDHW[0, 0].numel(), channels


def _merge_warps(elements: int) -> int:
    return min(max(elements // 1024, 1), 8)


def statistics(x_NCDHW: Tensor, epsilon: float, split: VolumeSplit | None) -> Tensor:
    """Return mean and 1 / standard deviation of every instance, fp32 (2, N, C), over the ranks of ``split``."""
    samples, voxels, channels = _sizes(x_NCDHW)
    pass_ = cut(TILES["moments"], samples, voxels, channels, x_NCDHW.device, reverse=True)
    programs, block_v = pass_.grid[0], pass_.arguments["BLOCK_V"]
    partial = x_NCDHW.new_empty((2, samples, programs, channels), dtype=torch.float32)
    moments_kernel[pass_.grid](x_NCDHW, partial, voxels, channels, HEAD=min(_HEAD, block_v), **pass_.arguments)
    result = partial.new_empty((2, samples, channels))
    block_p = triton.next_power_of_2(programs)
    kernels.statistics_kernel[triton.cdiv(channels, _MERGE_COLUMNS), samples](
        partial, result, programs, voxels, channels, epsilon,
        SLAB=split is not None, BLOCK_V=block_v, REVERSE=True, BLOCK_P=block_p, BLOCK_C=_MERGE_COLUMNS,
        num_warps=_merge_warps(block_p * _MERGE_COLUMNS),
    )  # fmt: skip
    if split is None:
        return result
    gathered = split.gather(result)
    instances = samples * channels
    kernels.slab_statistics_kernel[(triton.cdiv(instances, _MERGE_INSTANCES),)](
        gathered, result, split.ranks, voxels, instances, epsilon, BLOCK=_MERGE_INSTANCES, num_warps=1
    )
    return result


def normalise(x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, statistics_2NC: Tensor) -> Tensor:
    """Return ``relu((x - mean) * rstd * weight + bias)``, shape and dtype of ``x_NCDHW``; statistics: mean and rstd."""
    samples, voxels, channels = _sizes(x_NCDHW)
    pass_ = cut(TILES["normalise"], samples, voxels, channels, x_NCDHW.device, reverse=False)
    y_NCDHW = torch.empty_like(x_NCDHW)
    kernels.normalise_kernel[pass_.grid](
        x_NCDHW, weight_C, bias_C, statistics_2NC, y_NCDHW, voxels, channels, **pass_.arguments
    )
    return y_NCDHW


def forward(
    x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None
) -> tuple[Tensor, Tensor]:
    """Return ``relu(instance norm of x)`` of a channels_last_3d input, and mean and 1 / deviation, fp32 (2, N, C)."""
    require_contiguous(weight=weight_C, bias=bias_C)
    samples, voxels, channels = _sizes(x_NCDHW)
    if split is not None or voxels > SMALL_TILES["forward"].voxels:
        statistics_2NC = statistics(x_NCDHW, epsilon, split)
        return normalise(x_NCDHW, weight_C, bias_C, statistics_2NC), statistics_2NC
    pass_ = cut_small(SMALL_TILES["forward"], samples, voxels, channels)
    y_NCDHW = torch.empty_like(x_NCDHW)
    statistics_2NC = x_NCDHW.new_empty((2, samples, channels), dtype=torch.float32)
    kernels.small_forward_kernel[pass_.grid](
        x_NCDHW, weight_C, bias_C, y_NCDHW, statistics_2NC, voxels, channels, epsilon, **pass_.arguments
    )
    return y_NCDHW, statistics_2NC


class Gradient(NamedTuple):
    """Gradient of the result, which is the sum of both attributes.

    Attributes:
        first: gradient from one consumer of the result, (N, C, D, H, W) channels_last_3d.
        second: gradient from the other consumer, as rows (N V, C) with any row stride; None if there is none.
    """

    first: Tensor
    second: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, Tensor | None, int]:
        """Return the first arguments of every backward kernel: both gradients, and the row stride of the second."""
        return self.first, self.second, 0 if self.second is None else self.second.stride(0)

    @property
    def fork(self) -> bool:
        """Return whether there are two consumers."""
        return self.second is not None


def _merge_sums(partial: Tensor, weight_C: Tensor, sums_2NC: Tensor | None) -> Tensor:
    """Return the gradients of bias and weight, (2, C) in the dtype of the weight.

    Args:
        partial: sums of the programs of each sample, fp32 (2, N, programs, C).
        sums_2NC: output for the sums of every instance, fp32; None if they are not needed.
    """
    _, samples, programs, channels = partial.shape
    gradients_2C = torch.empty((2, channels), dtype=weight_C.dtype, device=partial.device)
    block_n = min(triton.next_power_of_2(samples), _MERGE_SAMPLES)
    block_p = triton.next_power_of_2(programs)
    kernels.sums_kernel[triton.cdiv(channels, _MERGE_COLUMNS), 2](
        partial, sums_2NC, gradients_2C, samples, programs, channels,
        SUMS=sums_2NC is not None, BLOCK_N=block_n, BLOCK_P=block_p, BLOCK_C=_MERGE_COLUMNS,
        num_warps=_merge_warps(block_n * block_p * _MERGE_COLUMNS),
    )  # fmt: skip
    return gradients_2C


def _large_backward(
    gradient: Gradient,
    x_NCDHW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    statistics_2NC: Tensor,
    split: VolumeSplit | None,
) -> tuple[Tensor, Tensor]:
    samples, voxels, channels = sizes = _sizes(x_NCDHW)
    pass_ = cut(TILES["gradient_sums"], *sizes, x_NCDHW.device, reverse=False)
    partial = statistics_2NC.new_empty((2, samples, pass_.grid[0], channels))
    inputs = (*gradient.arguments, x_NCDHW, weight_C, bias_C, statistics_2NC)
    kernels.gradient_sums_kernel[pass_.grid](*inputs, partial, voxels, channels, FORK=gradient.fork, **pass_.arguments)
    sums_2NC = partial.new_empty((2, samples, channels))
    gradients_2C = _merge_sums(partial, weight_C, sums_2NC)
    if split is not None:
        split.sum_(sums_2NC)
    dx_NCDHW = torch.empty_like(x_NCDHW)
    pass_ = cut(TILES["input_gradient"], *sizes, x_NCDHW.device, reverse=True)
    share = 1.0 / whole_volume(x_NCDHW, split)
    kernels.input_gradient_kernel[pass_.grid](
        *inputs, sums_2NC, dx_NCDHW, voxels, channels, share, FORK=gradient.fork, **pass_.arguments
    )
    return dx_NCDHW, gradients_2C


def _small_backward(
    gradient: Gradient, x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, statistics_2NC: Tensor
) -> tuple[Tensor, Tensor]:
    samples, voxels, channels = _sizes(x_NCDHW)
    pass_ = cut_small(SMALL_TILES["backward"], samples, voxels, channels)
    dx_NCDHW = torch.empty_like(x_NCDHW)
    # with one sample, the sums are already the gradients of the parameters
    dtype = weight_C.dtype if samples == 1 else torch.float32
    sums_2NC = torch.empty((2, samples, channels), dtype=dtype, device=x_NCDHW.device)
    kernels.small_backward_kernel[pass_.grid](
        *gradient.arguments, x_NCDHW, weight_C, bias_C, statistics_2NC, dx_NCDHW, sums_2NC, voxels, channels,
        FORK=gradient.fork, **pass_.arguments,
    )  # fmt: skip
    if samples == 1:
        return dx_NCDHW, sums_2NC.squeeze(1)
    return dx_NCDHW, _merge_sums(sums_2NC.unsqueeze(2), weight_C, None)


def backward(
    gradient: Gradient,
    x_NCDHW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    statistics_2NC: Tensor,
    split: VolumeSplit | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input, in its shape, and of bias and weight, (2, C) in the weight's dtype."""
    if split is not None or x_NCDHW[0, 0].numel() > SMALL_TILES["backward"].voxels:
        return _large_backward(gradient, x_NCDHW, weight_C, bias_C, statistics_2NC, split)
    return _small_backward(gradient, x_NCDHW, weight_C, bias_C, statistics_2NC)


class _InstanceNormReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None
    ) -> tuple[Tensor, Tensor]:
        x_NCDHW = x_NCDHW.contiguous(memory_format=torch.channels_last_3d)
        y_NCDHW, statistics_2NC = forward(x_NCDHW, weight_C, bias_C, epsilon, split)
        ctx.save_for_backward(x_NCDHW, weight_C, bias_C, statistics_2NC)
        ctx.set_materialize_grads(False)
        ctx.split = split
        return y_NCDHW, second_reader(y_NCDHW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 5
        first = given[0].contiguous(memory_format=torch.channels_last_3d)
        gradient = Gradient(first, channels_last_rows(given[1]) if len(given) > 1 else None)
        x_NCDHW, weight_C, bias_C, statistics_2NC = ctx.saved_tensors
        dx_NCDHW, d_parameters = backward(gradient, x_NCDHW, weight_C, bias_C, statistics_2NC, ctx.split)
        return dx_NCDHW, d_parameters[1], d_parameters[0].to(bias_C.dtype), None, None


def instance_norm_relu(
    x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``relu(instance norm of x)`` twice, for two consumers, in the shape and dtype of ``x_NCDHW``.

    See :func:`benchmarks.unet3d.ops.instance_norm.instance_norm_relu_reference`. Both results are channels_last_3d and
    share memory.
    """
    split = None if split is None or split.ranks == 1 else split
    whole_volume(x_NCDHW, split)
    result: tuple[Tensor, Tensor] = _InstanceNormReLU.apply(x_NCDHW, weight_C, bias_C, epsilon, split)
    return result
