"""Launches and autograd function of the kernels of :mod:`benchmarks.openfold.ops.pair_bias_attention.kernels`.

Shapes: B samples, S rows of a sample, N positions in a row, H heads, C channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.openfold.ops.pair_bias_attention import MASKED, is_transposed, kernels
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(queries=64, keys=64, warps=4, stages=2),
    "query_gradient": Tile(queries=64, keys=64, warps=4, stages=2),
    "key_value_gradient": Tile(queries=64, keys=64, warps=4, stages=2),
    "bias_gradient": Tile(queries=64, keys=64, warps=8, stages=2),
}
"""Tiles by kernel; fixed, so that results are the same in every run."""
FLOAT32_TILE = Tile(queries=32, keys=32, warps=4, stages=1)
"""Tile of all kernels for fp32, whose products use no tensor cores."""

_PARTS = 8
"""Parts of the rows over which programs sum the gradient of the bias."""
_SMALLEST_BLOCK = 16  # of channels, for matrix products


def _constants(name: str, qkvg_BSN4HC: Tensor) -> dict[str, Any]:
    heads, channels = qkvg_BSN4HC.shape[4:]
    tile = FLOAT32_TILE if qkvg_BSN4HC.dtype == torch.float32 else TILES[name]
    return {
        "H": heads,
        "C": channels,
        "BLOCK_C": max(triton.next_power_of_2(channels), _SMALLEST_BLOCK),
        "MASKED": MASKED,
        "PRECISION": "ieee",  # ignored for 16-bit inputs
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _check(qkvg_BSN4HC: Tensor, gate_bias_HC: Tensor) -> None:
    heads, channels = qkvg_BSN4HC.shape[4:]
    require_contiguous(gate_bias=gate_bias_HC)
    if qkvg_BSN4HC.stride()[3:] != (heads * channels, channels, 1):
        raise ValueError(
            f"queries, keys, values and gates of a position must be contiguous, not {tuple(qkvg_BSN4HC.shape)} with "
            f"strides {qkvg_BSN4HC.stride()}"
        )


def _empty_context(qkvg_BSN4HC: Tensor) -> Tensor:
    samples, rows, positions, _, heads, channels = qkvg_BSN4HC.shape
    if is_transposed(qkvg_BSN4HC):
        return qkvg_BSN4HC.new_empty(samples, positions, rows, heads, channels).transpose(1, 2)
    return qkvg_BSN4HC.new_empty(samples, rows, positions, heads, channels)


def _bias_strides(bias_BHNN: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if bias_BHNN is None else bias_BHNN.stride()


def forward(
    qkvg_BSN4HC: Tensor, gate_bias_HC: Tensor, mask_BSN: Tensor, bias_BHNN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gated context (B, S, N, H, C), and the logarithm (base 2) of the sum of the softmax, fp32 (B S, H, N).

    Raises:
        ValueError: the last three dimensions of ``qkvg`` or the bias of the gate are not contiguous.
    """
    _check(qkvg_BSN4HC, gate_bias_HC)
    samples, rows, positions, _, heads, channels = qkvg_BSN4HC.shape
    constants = _constants("forward", qkvg_BSN4HC)
    gated_BSNHC = _empty_context(qkvg_BSN4HC)
    lse = qkvg_BSN4HC.new_empty((samples * rows, heads, positions), dtype=torch.float32)
    grid = triton.cdiv(positions, constants["BLOCK_M"]), heads, samples * rows
    kernels.pair_bias_attention_forward_kernel[grid](
        qkvg_BSN4HC, gate_bias_HC, mask_BSN, bias_BHNN, gated_BSNHC, lse, rows, positions, channels**-0.5,
        *qkvg_BSN4HC.stride()[:3], *mask_BSN.stride(), *_bias_strides(bias_BHNN), *gated_BSNHC.stride()[:3],
        **constants,
    )  # fmt: skip
    return gated_BSNHC, lse


def backward(
    qkvg_BSN4HC: Tensor,
    gate_bias_HC: Tensor,
    mask_BSN: Tensor,
    bias_BHNN: Tensor | None,
    gated_BSNHC: Tensor,
    lse: Tensor,
    d_gated_BSNHC: Tensor,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of ``qkvg``, of the gate's bias, and of the pair bias if ``needs_bias``.

    Args:
        gated_BSNHC, lse: results of :func:`forward`.
    """
    samples, rows, positions, _, heads, channels = qkvg_BSN4HC.shape
    if d_gated_BSNHC.stride()[3:] != (channels, 1):
        d_gated_BSNHC = _empty_context(qkvg_BSN4HC).copy_(d_gated_BSNHC)
    d_qkvg = torch.empty_like(qkvg_BSN4HC)
    d_context = qkvg_BSN4HC.new_empty((samples * rows, heads, positions, channels))
    delta = torch.empty_like(lse)
    sizes = rows, positions, channels**-0.5
    strides = *qkvg_BSN4HC.stride()[:3], *mask_BSN.stride(), *_bias_strides(bias_BHNN)
    constants = _constants("query_gradient", qkvg_BSN4HC)
    grid = triton.cdiv(positions, constants["BLOCK_M"]), heads, samples * rows
    partial = lse.new_empty((grid[0] * grid[2], heads * channels))
    kernels.pair_bias_attention_query_gradient_kernel[grid](
        qkvg_BSN4HC, gate_bias_HC, mask_BSN, bias_BHNN, gated_BSNHC, d_gated_BSNHC, lse, d_qkvg, d_context, delta,
        partial, *sizes, *strides, *gated_BSNHC.stride()[:3], *d_gated_BSNHC.stride()[:3], *d_qkvg.stride()[:3],
        **constants,
    )  # fmt: skip
    constants = _constants("key_value_gradient", qkvg_BSN4HC)
    grid = triton.cdiv(positions, constants["BLOCK_N"]), heads, samples * rows
    kernels.pair_bias_attention_key_value_gradient_kernel[grid](
        qkvg_BSN4HC, mask_BSN, bias_BHNN, d_context, lse, delta, d_qkvg, *sizes, *strides, *d_qkvg.stride()[:3],
        **constants,
    )  # fmt: skip
    d_bias = None
    if needs_bias and bias_BHNN is not None:
        constants = _constants("bias_gradient", qkvg_BSN4HC)
        parts = min(_PARTS, rows)
        d_parts = lse.new_empty((parts, *bias_BHNN.shape))
        blocks = triton.cdiv(positions, constants["BLOCK_M"]) * triton.cdiv(positions, constants["BLOCK_N"])
        kernels.pair_bias_attention_bias_gradient_kernel[(blocks, heads, samples * parts)](
            qkvg_BSN4HC, mask_BSN, bias_BHNN, d_context, lse, delta, d_parts, *sizes, parts, samples, *strides,
            **constants,
        )  # fmt: skip
        d_bias = d_parts.sum(0).to(bias_BHNN.dtype)
    return d_qkvg, column_sums(partial, gate_bias_HC.dtype).view_as(gate_bias_HC), d_bias


class _PairBiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkvg_BSN4HC: Tensor, gate_bias_HC: Tensor, mask_BSN: Tensor, bias_BHNN: Tensor | None
    ) -> Tensor:
        gated_BSNHC, lse = forward(qkvg_BSN4HC, gate_bias_HC, mask_BSN, bias_BHNN)
        ctx.save_for_backward(qkvg_BSN4HC, gate_bias_HC, mask_BSN, bias_BHNN, gated_BSNHC, lse)
        return gated_BSNHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkvg, gate_bias, mask, bias, gated, lse = ctx.saved_tensors
        d_qkvg, d_gate_bias, d_bias = backward(
            qkvg, gate_bias, mask, bias, gated, lse, gradients[0], ctx.needs_input_grad[3]
        )
        return d_qkvg, d_gate_bias, None, d_bias


def pair_bias_attention(
    qkvg_BSN4HC: Tensor, gate_bias_HC: Tensor, mask_BSN: Tensor, bias_BHNN: Tensor | None
) -> Tensor:
    """Return the gated context (B, S, N, H, C).

    See :func:`benchmarks.openfold.ops.pair_bias_attention.pair_bias_attention_reference`.

    Raises:
        ValueError: the last three dimensions of ``qkvg`` or the bias of the gate are not contiguous.
    """
    result: Tensor = _PairBiasAttention.apply(qkvg_BSN4HC, gate_bias_HC, mask_BSN, bias_BHNN)
    return result
