"""Launches and autograd function of the Triton kernels of group norm.

Small samples use :mod:`common.ops.group_norm.slab_kernels`, others :mod:`common.ops.group_norm.kernels`. Activations in
another memory format are first copied to channels_last. Shapes: N samples, V pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.group_norm import GroupNormResult, check, kernels, slab_kernels
from common.ops.norm.moments import moments_kernel
from common.ops.tile import Tile
from common.ops.tiling import block_of_columns, cut, sums_by_dtype
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "moments": Tile(columns=64, elements=4096, warps=4, programs=4, stages=3),
    "normalise": Tile(columns=64, elements=4096, warps=4, programs=0, stages=3),
    "gradient_sums": Tile(columns=64, elements=2048, warps=4, programs=4, stages=3),
    "input_gradient": Tile(columns=64, elements=8192, warps=4, programs=0, stages=3),
}
"""Tile of each pass."""

SLAB_TILES: dict[str, Tile] = {
    "forward": Tile(most=131072, columns=32, held=32768, elements=4096, elements_per_warp=512, stages=3, whole=1 << 21),
    "backward": Tile(
        most=131072, columns=32, held=16384, elements=4096, elements_per_warp=512, stages=1, whole=1 << 21
    ),
}
"""Tile of each direction for the slab kernels, whose programs own whole groups of a sample (a slab).

- ``most``: largest number of elements of a slab; larger samples take several launches (0: all samples do);
- ``columns``: smallest number of channels of a slab, which contains several groups if they are narrower;
- ``held``: largest number of elements that a program keeps in registers, and so reads only once;
- ``elements``: size of a tile of larger slabs;
- ``elements_per_warp``: elements per warp, from which the number of warps follows;
- ``whole``: largest number of elements of all samples; larger inputs take several launches, which fill a GPU better.
"""

_MOST_WARPS = 16
_HEAD = 16


class Sizes(NamedTuple):
    """Sizes of one call of the group norm.

    Attributes:
        samples, voxels: N and V.
        parts: channels of each input.
        groups: G.
    """

    samples: int
    voxels: int
    parts: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, inputs: Sequence[Tensor], groups: int) -> Sizes:
        """Return the sizes of a call with these inputs."""
        samples, _, height, width = inputs[0].shape
        return cls(samples, height * width, tuple(x_NCHW.shape[1] for x_NCHW in inputs), groups)

    @property
    def channels(self) -> int:
        """Return C, the channels of all inputs."""
        return sum(self.parts)

    @property
    def width(self) -> int:
        """Return the channels per group."""
        return self.channels // self.groups


class Affine(NamedTuple):
    """Arguments of a call besides its inputs.

    Attributes:
        weight_C, bias_C: scale and shift.
        added_NC: contiguous; None if nothing is added.
        silu: whether SiLU follows.
    """

    weight_C: Tensor
    bias_C: Tensor
    added_NC: Tensor | None
    silu: bool

    @property
    def added(self) -> bool:
        """Return whether something is added to the input."""
        return self.added_NC is not None


def _second(tensors: Sequence[Tensor | None]) -> Tensor | None:
    return tensors[1] if len(tensors) == 2 else None


# One launch: programs own whole groups


class Slabs(NamedTuple):
    """Grid and constants of a launch in which each program owns a slab."""

    grid: tuple[int, int]
    arguments: dict[str, Any]


def cut_slabs(tile: Tile, sizes: Sizes) -> Slabs | None:
    """Cut each sample into slabs; None if a slab or the whole input is too large for ``tile``."""
    width, groups = sizes.width, sizes.groups
    counts = [count for count in range(1, groups + 1) if groups % count == 0]
    count = next((count for count in counts if count * width >= tile.columns), groups)
    block_c = triton.next_power_of_2(count * width)
    whole = triton.next_power_of_2(sizes.voxels)
    if sizes.voxels * count * width > tile.most or sizes.samples * sizes.voxels * sizes.channels > tile.whole:
        return None
    held = whole * block_c <= tile.held
    block_v = whole if held else max(1, min(tile.elements // block_c, whole))
    warps = min(max(block_v * block_c // tile.elements_per_warp, 1), _MOST_WARPS)
    arguments = {
        "PAIR": len(sizes.parts) == 2,
        "WIDTH": width,
        "GROUPS": count,
        "BLOCK_V": block_v,
        "BLOCK_C": block_c,
        "HELD": held,
        "STAGES": tile.stages,
        "num_warps": warps,
    }
    return Slabs((groups // count, sizes.samples), arguments)


# Several launches: passes over the pixels of one input at a time, and merges of the programs' partial sums


class Walk(NamedTuple):
    """Launches of one pass over all inputs.

    Attributes:
        grids: one grid per input.
        arguments: common arguments of all passes, which follow the arguments of the pass.
    """

    grids: list[tuple[int, int, int]]
    arguments: dict[str, Any]

    @property
    def programs(self) -> int:
        """Return the number of programs that share a column of a sample."""
        return self.grids[0][0]


def cut_parts(tile: Tile, sizes: Sizes, device: torch.device, reverse: bool) -> Walk:
    """Cut each input into tiles of one size for one pass, so that all inputs have equally many partial sums."""
    block_c = min(block_of_columns(channels, tile.columns) for channels in sizes.parts)
    blocks = [triton.cdiv(channels, block_c) for channels in sizes.parts]
    whole = cut(
        tile.replace(columns=block_c), sizes.samples, sizes.voxels, sum(blocks) * block_c, device, reverse=reverse
    )
    even = whole.arguments["EVEN"] and all(channels % block_c == 0 for channels in sizes.parts)
    grids = [(whole.grid[0], count, sizes.samples) for count in blocks]
    return Walk(grids, {**whole.arguments, "EVEN": even})


def _starts(sizes: Sizes) -> list[int]:
    """Return the first channel of each input."""
    return [0, sizes.parts[0]][: len(sizes.parts)]


def _merge(sizes: Sizes, programs: int) -> dict[str, Any]:
    """Return the constants of a launch that merges the partial sums of ``programs`` programs."""
    block_p, block_w = triton.next_power_of_2(programs), triton.next_power_of_2(sizes.width)
    warps = min(max(block_p * block_w // 1024, 1), 8)
    return {
        "PAIR": len(sizes.parts) == 2,
        "WIDTH": sizes.width,
        "BLOCK_W": block_w,
        "BLOCK_P": block_p,
        "num_warps": warps,
    }


def _statistics(inputs: Sequence[Tensor], sizes: Sizes, added_NC: Tensor | None, eps: float) -> Tensor:
    """Return mean and 1 / standard deviation of every group, fp32 (2, N, G)."""
    walk = cut_parts(TILES["moments"], sizes, inputs[0].device, reverse=True)
    block_v = walk.arguments["BLOCK_V"]
    partials = []
    for x_NCHW, grid in zip(inputs, walk.grids, strict=True):
        channels = x_NCHW.shape[1]
        partial = x_NCHW.new_empty((2, sizes.samples, walk.programs, channels), dtype=torch.float32)
        moments_kernel[grid](x_NCHW, partial, sizes.voxels, channels, HEAD=min(_HEAD, block_v), **walk.arguments)
        partials.append(partial)
    statistics_2NG = partials[0].new_empty((2, sizes.samples, sizes.groups))
    kernels.group_norm_statistics_kernel[sizes.groups, sizes.samples](
        partials[0], _second(partials), added_NC, statistics_2NG,
        walk.programs, sizes.voxels, sizes.channels, sizes.parts[0], eps,
        ADDED=added_NC is not None, BLOCK_V=block_v, REVERSE=True, **_merge(sizes, walk.programs),
    )  # fmt: skip
    return statistics_2NG


def forward(inputs: Sequence[Tensor], affine: Affine, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the result (N, C, H, W) and the statistics, fp32 (2, N, G), of channels_last inputs.

    Launches one kernel; for large samples three, or five with a pair of inputs.
    """
    require_contiguous(weight=affine.weight_C, bias=affine.bias_C)
    sizes = Sizes.of(inputs, groups)
    first_NCHW = inputs[0]
    y_NCHW = torch.empty(
        (sizes.samples, sizes.channels, *first_NCHW.shape[2:]),
        dtype=first_NCHW.dtype, device=first_NCHW.device, memory_format=torch.channels_last,
    )  # fmt: skip
    constants = {"ADDED": affine.added, "SILU": affine.silu}
    slab = cut_slabs(SLAB_TILES["forward"], sizes)
    if slab is not None:
        statistics_2NG = first_NCHW.new_empty((2, sizes.samples, groups), dtype=torch.float32)
        slab_kernels.group_norm_slab_forward_kernel[slab.grid](
            first_NCHW, _second(inputs), affine.added_NC, affine.weight_C, affine.bias_C, y_NCHW, statistics_2NG,
            sizes.voxels, sizes.channels, sizes.parts[0], eps, **constants, **slab.arguments,
        )  # fmt: skip
        return y_NCHW, statistics_2NG
    statistics_2NG = _statistics(inputs, sizes, affine.added_NC, eps)
    walk = cut_parts(TILES["normalise"], sizes, first_NCHW.device, reverse=False)
    # the first pass read the last input last, so that input is still in the L2 cache
    for x_NCHW, start, grid in reversed(list(zip(inputs, _starts(sizes), walk.grids, strict=True))):
        kernels.group_norm_normalise_kernel[grid](
            x_NCHW, affine.added_NC, affine.weight_C, affine.bias_C, statistics_2NG, y_NCHW,
            sizes.voxels, x_NCHW.shape[1], start, sizes.channels, groups,
            **constants, WIDTH=sizes.width, **walk.arguments,
        )  # fmt: skip
    return y_NCHW, statistics_2NG


class GroupNormGradients(NamedTuple):
    """Results of the backward pass.

    Attributes:
        inputs: gradient of each input, channels_last.
        added_NC: gradient of ``added_NC``; None if nothing was added.
        sums_N2C: gradients of bias and weight per sample, fp32.
    """

    inputs: list[Tensor]
    added_NC: Tensor | None
    sums_N2C: Tensor


def backward(
    dy_NCHW: Tensor,
    kept: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    affine: Affine,
    statistics_2NG: Tensor,
) -> GroupNormGradients:
    """Return the gradients, from channels_last tensors.

    Launches one kernel; for large samples three, or five with a pair of inputs.

    Args:
        dy_NCHW: gradient of the result.
        kept: gradient of each returned input; None for no gradient.
    """
    samples, groups = statistics_2NG.shape[1:]
    sizes = Sizes.of(inputs, groups)
    found = GroupNormGradients(
        [torch.empty_like(x_NCHW) for x_NCHW in inputs],
        None if affine.added_NC is None else torch.empty_like(affine.added_NC),
        statistics_2NG.new_empty((samples, 2, sizes.channels)),
    )
    parameters = (affine.added_NC, affine.weight_C, affine.bias_C)
    constants = {"ADDED": affine.added, "SILU": affine.silu}
    slab = cut_slabs(SLAB_TILES["backward"], sizes)
    if slab is not None:
        slab_kernels.group_norm_slab_backward_kernel[slab.grid](
            dy_NCHW, kept[0], _second(kept), inputs[0], _second(inputs), *parameters, statistics_2NG,
            found.inputs[0], _second(found.inputs), found.added_NC, found.sums_N2C,
            sizes.voxels, sizes.channels, sizes.parts[0],
            KEPT_FIRST=kept[0] is not None, KEPT_SECOND=_second(kept) is not None,
            **constants, **slab.arguments,
        )  # fmt: skip
        return found
    walk = cut_parts(TILES["gradient_sums"], sizes, dy_NCHW.device, reverse=False)
    partials = []
    for x_NCHW, start, grid in zip(inputs, _starts(sizes), walk.grids, strict=True):
        kinds = 3 if affine.added else 2
        partial = statistics_2NG.new_empty((kinds, samples, walk.programs, x_NCHW.shape[1]))
        kernels.group_norm_gradient_sums_kernel[grid](
            dy_NCHW, x_NCHW, *parameters, statistics_2NG, partial,
            sizes.voxels, x_NCHW.shape[1], start, sizes.channels, groups,
            **constants, WIDTH=sizes.width, **walk.arguments,
        )  # fmt: skip
        partials.append(partial)
    coefficients_2NG = torch.empty_like(statistics_2NG)
    kernels.group_norm_coefficients_kernel[groups, samples](
        partials[0], _second(partials), affine.weight_C, statistics_2NG, found.sums_N2C, coefficients_2NG,
        found.added_NC, walk.programs, sizes.voxels, sizes.channels, sizes.parts[0],
        ADDED=affine.added, **_merge(sizes, walk.programs),
    )  # fmt: skip
    walk = cut_parts(TILES["input_gradient"], sizes, dy_NCHW.device, reverse=True)
    # the first pass read the last input last, so that input is still in the L2 cache
    each = zip(inputs, kept, found.inputs, _starts(sizes), walk.grids, strict=True)
    for x_NCHW, kept_NCHW, dx_NCHW, start, grid in reversed(list(each)):
        kernels.group_norm_input_gradient_kernel[grid](
            dy_NCHW, kept_NCHW, x_NCHW, *parameters, statistics_2NG, coefficients_2NG, dx_NCHW,
            sizes.voxels, x_NCHW.shape[1], start, sizes.channels, groups,
            KEPT=kept_NCHW is not None, **constants, WIDTH=sizes.width, **walk.arguments,
        )  # fmt: skip
    return found


def _channels_last(x_NCHW: Tensor) -> Tensor:
    return x_NCHW.contiguous(memory_format=torch.channels_last)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_C: Tensor, bias_C: Tensor, added_NC: Tensor | None, groups: int, eps: float, silu: bool, keep: bool,
        *inputs: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        laid_out = tuple(_channels_last(x_NCHW) for x_NCHW in inputs)
        added_NC = None if added_NC is None else added_NC.contiguous()
        y_NCHW, statistics_2NG = forward(laid_out, Affine(weight_C, bias_C, added_NC, silu), groups, eps)
        ctx.save_for_backward(weight_C, bias_C, added_NC, statistics_2NG, *laid_out)
        ctx.set_materialize_grads(False)
        ctx.silu = silu
        return (y_NCHW, *laid_out) if keep else y_NCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_C, bias_C, added_NC, statistics_2NG, *inputs = ctx.saved_tensors
        dy_NCHW, *kept = (None if given is None else _channels_last(given) for given in gradients)
        kept = kept or [None] * len(inputs)
        if dy_NCHW is None:  # the result was not used
            return (None,) * 7 + tuple(kept)
        found = backward(dy_NCHW, kept, inputs, Affine(weight_C, bias_C, added_NC, ctx.silu), statistics_2NG)
        d_bias_C, d_weight_C = sums_by_dtype(found.sums_N2C.flatten(1), (bias_C.dtype, weight_C.dtype))
        return d_weight_C, d_bias_C, found.added_NC, None, None, None, None, *found.inputs


def group_norm(
    inputs: tuple[Tensor, ...],
    weight_C: Tensor,
    bias_C: Tensor,
    groups: int,
    eps: float,
    *,
    silu: bool,
    added_NC: Tensor | None = None,
    keep: bool = False,
) -> GroupNormResult:
    """Return the group norm (N, C, H, W), then SiLU if ``silu``; with ``keep`` also ``inputs``.

    See :func:`common.ops.group_norm.group_norm_reference`.
    """
    check(inputs, weight_C, groups, added_NC)
    result = _GroupNorm.apply(weight_C, bias_C, added_NC, groups, eps, silu, keep, *inputs)
    if not keep:
        y_NCHW: Tensor = result
        return y_NCHW
    return result[0], tuple(result[1:])
