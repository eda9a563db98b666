"""Launches and autograd functions of the Triton kernels of :mod:`common.ops.batch_norm.kernels`.

Activations are channels_last; others are copied into that format first. Shapes: M = N * H * W rows, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from common.ops.batch_norm import kernels
from common.ops.batch_norm.reference import BatchNormState, batch_norm_evaluate_reference
from common.ops.norm.autograd import second_reader
from common.ops.tile import Tile
from common.ops.triton_support import programs_for, require_contiguous

TILES: dict[str, Tile] = {
    "moments": Tile(columns=64, elements=8192, warps=4, programs=2, stages=3),
    "normalise": Tile(columns=128, elements=4096, warps=8, programs=0, stages=1),
    "normalise_add": Tile(columns=256, elements=2048, warps=4, programs=0, stages=1),
    "normalise_dual": Tile(columns=256, elements=2048, warps=4, programs=0, stages=1),
    "gradient_sums": Tile(columns=64, elements=4096, warps=4, programs=2, stages=3),
    "gradient_sums_add": Tile(columns=64, elements=2048, warps=4, programs=4, stages=1),
    "gradient_sums_dual": Tile(columns=128, elements=4096, warps=4, programs=2, stages=3),
    "input_gradient": Tile(columns=128, elements=8192, warps=8, programs=0, stages=1),
    "input_gradient_dual": Tile(columns=128, elements=8192, warps=8, programs=0, stages=1),
}
"""Tiles by pass, from a sweep over the layers of ResNet-50 at batch 400 on an H200."""

_FINALISE_COLUMNS = 16
_FINALISE_CHUNK = 512


class RowCut(NamedTuple):
    """The launch of one pass.

    Attributes:
        arguments: keyword arguments that all passes have.
        programs: number of programs that share a block of columns.
    """

    grid: tuple[int]
    arguments: dict[str, Any]
    programs: int


def cut(tile: Tile, rows: int, channels: int, device: torch.device, reverse: bool) -> RowCut:
    """Divide a (rows, channels) matrix into tiles for one pass; ``reverse`` starts with the last tile."""
    block_c = min(triton.next_power_of_2(channels), tile.columns)
    block_m = max(tile.elements // block_c, 1)
    column_blocks = triton.cdiv(channels, block_c)
    programs = programs_for(triton.cdiv(rows, block_m), tile.programs, device, column_blocks)
    arguments = {
        "M": rows,
        "C": channels,
        "BLOCK_M": block_m,
        "BLOCK_C": block_c,
        "EVEN": rows % block_m == 0 and channels % block_c == 0,
        "STAGES": tile.stages,
        "REVERSE": reverse,
        "num_warps": tile.warps,
    }
    return RowCut((column_blocks * programs,), arguments, programs)


def _rows(x_NCHW: Tensor) -> int:
    return x_NCHW.numel() // x_NCHW.shape[1]


def _channels_last(x_NCHW: Tensor) -> Tensor:
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def partial_moments(x_NCHW: Tensor) -> Tensor:
    """Return partial sums of x - pivot and of its square, fp32 (2, programs, C). The pivot is the first row of x."""
    rows, channels = _rows(x_NCHW), x_NCHW.shape[1]
    pass_ = cut(TILES["moments"], rows, channels, x_NCHW.device, reverse=True)
    partial = x_NCHW.new_empty((2, pass_.programs, channels), dtype=torch.float32)
    kernels.moments_kernel[pass_.grid](x_NCHW, partial, **pass_.arguments)
    return partial


def statistics(
    x_NCHW: Tensor, norm: BatchNormState, group: dist.ProcessGroup | None, moments_21C: Tensor | None = None
) -> Tensor:
    """Return the statistics of a channels_last ``x_NCHW`` and update the running ones of ``norm``.

    Args:
        group: ranks that share statistics; None for this rank alone.
        moments_21C: sums of x and of its square over N, H, W, fp32 (2, 1, C), if a convolution has computed them.

    Returns:
        (5, C) fp32, as :mod:`common.ops.batch_norm.kernels` describes them.
    """
    rows, channels = _rows(x_NCHW), x_NCHW.shape[1]
    partial = partial_moments(x_NCHW) if moments_21C is None else moments_21C
    result = partial.new_empty((5, channels))
    moments = result if group is None else partial.new_empty((3, channels))
    parameters = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    require_contiguous(**dict(zip(("weight", "bias", "mean", "variance"), parameters, strict=True)), moments=partial)
    grid = (triton.cdiv(channels, _FINALISE_COLUMNS),)
    kernels.statistics_kernel[grid](
        x_NCHW, partial, *parameters, moments, partial.shape[1], rows, channels, norm.momentum, norm.eps,
        PIVOT=moments_21C is None, GROUP=group is not None, **_finalise(partial.shape[1]),
    )  # fmt: skip
    if group is not None:
        gathered = partial.new_empty((dist.get_world_size(group) * 3, channels))
        dist.all_gather_into_tensor(gathered, moments, group=group)
        kernels.group_statistics_kernel[grid](
            gathered, *parameters, result, dist.get_world_size(group), channels, norm.momentum, norm.eps,
            BLOCK_C=_FINALISE_COLUMNS,
        )  # fmt: skip
    return result


def normalise(
    x_NCHW: Tensor,
    statistics_5C: Tensor,
    relu: bool,
    residual_NCHW: Tensor | None = None,
    residual_statistics_5C: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``x * scale + shift``, plus the residual if there is one, then ReLU if ``relu``.

    Returns:
        The result, and with a residual a mask of positive results: uint8 (M, C / 8), one bit per channel.
    """
    rows, channels = _rows(x_NCHW), x_NCHW.shape[1]
    name = "normalise" + _suffix(residual_NCHW is not None, residual_statistics_5C is not None)
    pass_ = cut(TILES[name], rows, channels, x_NCHW.device, reverse=False)
    y_NCHW = torch.empty_like(x_NCHW)
    bits = None if residual_NCHW is None else x_NCHW.new_empty((rows, channels // 8), dtype=torch.uint8)
    kernels.normalise_kernel[pass_.grid](
        x_NCHW, statistics_5C, residual_NCHW, residual_statistics_5C, y_NCHW, bits,
        RELU=relu, RESIDUAL=bits is not None, RESIDUAL_NORM=residual_statistics_5C is not None, **pass_.arguments,
    )  # fmt: skip
    return y_NCHW, bits


def gradient_sums(
    dy_NCHW: Tensor,
    other_dy_NCHW: Tensor | None,
    x_NCHW: Tensor,
    statistics_5C: Tensor,
    relu: bool,
    bits: Tensor | None = None,
    residual_NCHW: Tensor | None = None,
    residual_statistics_5C: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of the batch norm gradient.

    Args:
        dy_NCHW, other_dy_NCHW: gradients from the two consumers of the result; the second may be None.
        relu: whether forward applied ReLU.
        bits: mask of positive results of :func:`normalise`; None without a residual.
        residual_NCHW, residual_statistics_5C: the residual and its statistics, if it has a batch norm.

    Returns:
        Partial sums, fp32 (2 or 3, programs, C), and with a residual dz, the sum of both gradients masked by ReLU.
    """
    rows, channels = _rows(x_NCHW), x_NCHW.shape[1]
    name = "gradient_sums" + _suffix(bits is not None, residual_NCHW is not None)
    pass_ = cut(TILES[name], rows, channels, x_NCHW.device, reverse=False)
    partial = x_NCHW.new_empty((2 if residual_NCHW is None else 3, pass_.programs, channels), dtype=torch.float32)
    dz_NCHW = None if bits is None else torch.empty_like(x_NCHW)
    kernels.gradient_sums_kernel[pass_.grid](
        dy_NCHW, other_dy_NCHW, x_NCHW, residual_NCHW, statistics_5C, residual_statistics_5C, bits, dz_NCHW, partial,
        FORK=other_dy_NCHW is not None, RELU=relu, RESIDUAL=bits is not None,
        RESIDUAL_NORM=residual_NCHW is not None, **pass_.arguments,
    )  # fmt: skip
    return partial, dz_NCHW


def coefficients(
    total: Tensor, product: Tensor, statistics_5C: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Add the partial sums of the batch norm gradient.

    Args:
        total, product: partial sums of dz and of dz * (x - mean), fp32 (programs, C).
        group: ranks that share statistics; None for this rank alone.

    Returns:
        Gradients of bias and weight on this rank, fp32 (2, C), and the (3, C) coefficients of dx.
    """
    programs, channels = total.shape
    gradients, result = total.new_empty((2, channels)), total.new_empty((3, channels))
    grid = (triton.cdiv(channels, _FINALISE_COLUMNS),)
    kernels.coefficients_kernel[grid](
        total, product, statistics_5C, gradients, result, programs, channels,
        GROUP=group is not None, **_finalise(programs),
    )  # fmt: skip
    if group is not None:
        shared = gradients.clone()
        dist.all_reduce(shared, group=group)
        kernels.group_coefficients_kernel[grid](shared, statistics_5C, result, channels, BLOCK_C=_FINALISE_COLUMNS)
    return gradients, result


def input_gradient(
    dz_NCHW: Tensor,
    x_NCHW: Tensor,
    statistics_5C: Tensor,
    coefficients_3C: Tensor,
    relu: bool,
    residual_NCHW: Tensor | None = None,
    residual_coefficients_3C: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute dx = ``a * dz + b * x + c``; with ``relu`` dz is first masked by the sign of the normalised x.

    Returns:
        dx, and the gradient of the input of the batch norm of the residual, if it has one.
    """
    rows, channels = _rows(x_NCHW), x_NCHW.shape[1]
    name = "input_gradient" + ("" if residual_NCHW is None else "_dual")
    pass_ = cut(TILES[name], rows, channels, x_NCHW.device, reverse=True)
    dx_NCHW = torch.empty_like(x_NCHW)
    d_residual_NCHW = None if residual_NCHW is None else torch.empty_like(x_NCHW)
    kernels.input_gradient_kernel[pass_.grid](
        dz_NCHW, x_NCHW, residual_NCHW, statistics_5C, coefficients_3C, residual_coefficients_3C, dx_NCHW,
        d_residual_NCHW, RELU=relu, RESIDUAL_NORM=residual_NCHW is not None, **pass_.arguments,
    )  # fmt: skip
    return dx_NCHW, d_residual_NCHW


def _finalise(programs: int) -> dict[str, int]:
    """Return the size arguments of a kernel that adds the partial sums of ``programs`` programs."""
    chunk = min(max(triton.next_power_of_2(programs), 2), _FINALISE_CHUNK)
    return {"CHUNK": chunk, "BLOCK_C": _FINALISE_COLUMNS, "num_warps": 8 if chunk >= 128 else 2}


def _suffix(add: bool, dual: bool) -> str:
    return "_dual" if dual else "_add" if add else ""


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NCHW: Tensor, weight: Tensor, bias: Tensor, norm: BatchNormState, relu: bool, group: dist.ProcessGroup | None,
        moments: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x_NCHW = _channels_last(x_NCHW)
        statistics_5C = statistics(x_NCHW, norm, group, moments)
        y_NCHW, _ = normalise(x_NCHW, statistics_5C, relu)
        ctx.save_for_backward(x_NCHW, statistics_5C)
        ctx.relu, ctx.group = relu, group
        return y_NCHW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, statistics_5C = ctx.saved_tensors
        dy_NCHW = _channels_last(gradients[0])
        partial, _ = gradient_sums(dy_NCHW, None, x_NCHW, statistics_5C, ctx.relu)
        d_parameters, coefficients_3C = coefficients(partial[0], partial[1], statistics_5C, ctx.group)
        dx_NCHW, _ = input_gradient(dy_NCHW, x_NCHW, statistics_5C, coefficients_3C, ctx.relu)
        return dx_NCHW, d_parameters[1], d_parameters[0], None, None, None, None


class _BatchNormAddReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NCHW: Tensor, weight: Tensor, bias: Tensor, norm: BatchNormState,
        residual_NCHW: Tensor, residual_weight: Tensor | None, residual_bias: Tensor | None,
        residual_norm: BatchNormState | None, group: dist.ProcessGroup | None,
        moments: Tensor | None, residual_moments: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x_NCHW, residual_NCHW = _channels_last(x_NCHW), _channels_last(residual_NCHW)
        statistics_5C = statistics(x_NCHW, norm, group, moments)
        residual_5C = None
        if residual_norm is not None:
            residual_5C = statistics(residual_NCHW, residual_norm, group, residual_moments)
        y_NCHW, bits = normalise(x_NCHW, statistics_5C, True, residual_NCHW, residual_5C)
        kept = (None, None) if residual_5C is None else (residual_NCHW, residual_5C)
        ctx.save_for_backward(x_NCHW, statistics_5C, bits, *kept)
        ctx.set_materialize_grads(False)
        ctx.group = group
        return y_NCHW, second_reader(y_NCHW)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x_NCHW, statistics_5C, bits, residual_NCHW, residual_5C = ctx.saved_tensors
        given = [_channels_last(gradient) for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 11
        dy_NCHW, other_dy_NCHW = given[0], given[1] if len(given) > 1 else None
        partial, dz_NCHW = gradient_sums(
            dy_NCHW, other_dy_NCHW, x_NCHW, statistics_5C, True, bits, residual_NCHW, residual_5C
        )
        assert dz_NCHW is not None
        d_parameters, coefficients_3C = coefficients(partial[0], partial[1], statistics_5C, ctx.group)
        if residual_NCHW is None:
            dx_NCHW, _ = input_gradient(dz_NCHW, x_NCHW, statistics_5C, coefficients_3C, False)
            return dx_NCHW, d_parameters[1], d_parameters[0], None, dz_NCHW, None, None, None, None, None, None
        d_residual, residual_3C = coefficients(partial[0], partial[2], residual_5C, ctx.group)
        dx_NCHW, d_residual_NCHW = input_gradient(
            dz_NCHW, x_NCHW, statistics_5C, coefficients_3C, False, residual_NCHW, residual_3C
        )
        return (
            dx_NCHW, d_parameters[1], d_parameters[0], None,
            d_residual_NCHW, d_residual[1], d_residual[0], None, None, None, None,
        )  # fmt: skip


def batch_norm(
    x_NCHW: Tensor,
    norm: BatchNormState,
    *,
    relu: bool = False,
    group: dist.ProcessGroup | None = None,
    moments: Tensor | None = None,
) -> Tensor:
    """Return ``BN(x)`` with the batch's statistics, then ReLU if ``relu``.

    See :func:`common.ops.batch_norm.reference.batch_norm_reference`.
    """
    result: Tensor = _BatchNorm.apply(x_NCHW, norm.weight, norm.bias, norm, relu, group, moments)
    return result


def batch_norm_add_relu(
    x_NCHW: Tensor,
    norm: BatchNormState,
    residual_NCHW: Tensor,
    residual_norm: BatchNormState | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    moments: Tensor | None = None,
    residual_moments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``relu(BN(x) + residual)`` twice, one for each consumer.

    See :func:`common.ops.batch_norm.reference.batch_norm_add_relu_reference`.
    """
    weight, bias = (None, None) if residual_norm is None else (residual_norm.weight, residual_norm.bias)
    result: tuple[Tensor, Tensor] = _BatchNormAddReLU.apply(
        x_NCHW, norm.weight, norm.bias, norm, residual_NCHW, weight, bias, residual_norm, group, moments,
        residual_moments,
    )  # fmt: skip
    return result


def _running_map(norm: BatchNormState) -> Tensor:
    """Return scale and shift of the running statistics, fp32 (2, C), in the layout of :func:`statistics`."""
    scale_C = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return torch.stack((scale_C, norm.bias - norm.running_mean * scale_C))


def batch_norm_evaluate(
    x_NCHW: Tensor,
    norm: BatchNormState,
    *,
    relu: bool = False,
    residual_NCHW: Tensor | None = None,
    residual_norm: BatchNormState | None = None,
) -> Tensor:
    """Return ``BN(x) + residual`` with the running statistics, then ReLU if ``relu``.

    See :func:`common.ops.batch_norm.reference.batch_norm_evaluate_reference`. The kernels have no backward pass: if
    gradients are enabled, the reference runs.
    """
    if torch.is_grad_enabled():
        return batch_norm_evaluate_reference(
            x_NCHW, norm, relu=relu, residual_NCHW=residual_NCHW, residual_norm=residual_norm
        )
    residual_NCHW = None if residual_NCHW is None else _channels_last(residual_NCHW)
    residual_2C = None if residual_norm is None else _running_map(residual_norm)
    return normalise(_channels_last(x_NCHW), _running_map(norm), relu, residual_NCHW, residual_2C)[0]
