"""Launches and autograd function of the Triton kernels of :mod:`common.ops.attention.kernels`.

Grids depend on shapes only, so one captured graph serves every batch.
Shapes: T tokens, S sequences, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.attention import kernels
from common.ops.attention.reference import HEAD_DIMS
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout.triton import Rate, rate
from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS_OF_COMPUTED, Handover, Scaling
from common.ops.fp8_cast.triton import Output, output
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import require_contiguous

_WORD = 32  # keys per word of the dropout mask
_WORDS_MULTIPLE = 128 // _WORD  # the largest tile (128 keys) also reads words after the last key


TILES: dict[str, Tile] = {
    "forward": Tile(queries=64, keys=64, warps=4, stages=3),
    "query_gradient": Tile(queries=64, keys=64, warps=4, stages=3),
    "key_value_gradient": Tile(queries=64, keys=64, warps=4, stages=3),
}
"""Tiles by kernel; fixed, so that results are the same in every run. ``keys`` is 32, 64 or 128."""
FLOAT32_TILES: dict[str, Tile] = dict.fromkeys(TILES, Tile(queries=32, keys=32, warps=4, stages=1))
"""Tiles for fp32. Its full precision does not use tensor cores, and larger tiles do not fit the registers."""


class AttentionCall(NamedTuple):
    """Numbers that forward and backward of one call share."""

    max_length: int
    rate: Rate
    site: int


def _constants(qkv_T3HD: Tensor, dropout: Rate, tile: Tile) -> dict[str, Any]:
    precision = "ieee" if qkv_T3HD.dtype == torch.float32 else "tf32"  # ignored for 16-bit inputs
    return {
        "H": qkv_T3HD.shape[2],
        "D": qkv_T3HD.shape[3],
        **dropout._asdict(),
        "PRECISION": precision,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _tile(kernel: str, qkv_T3HD: Tensor) -> Tile:
    return (FLOAT32_TILES if qkv_T3HD.dtype == torch.float32 else TILES)[kernel]


def _words(call: AttentionCall) -> int:
    """Return the number of mask words per query."""
    return triton.cdiv(triton.cdiv(call.max_length, _WORD), _WORDS_MULTIPLE) * _WORDS_MULTIPLE


def _grid_with_gaps(blocks: int, qkv_T3HD: Tensor, sequences: int) -> tuple[int, int, int]:
    heads = qkv_T3HD.shape[2]
    gap_programs = triton.cdiv(qkv_T3HD.shape[0], kernels.GAP_ROWS)
    return blocks, heads, sequences + triton.cdiv(gap_programs, blocks * heads)


def forward(
    qkv_T3HD: Tensor, starts_S: Tensor, lengths_S: Tensor, seed: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the context and the tensors that the backward pass needs.

    Returns:
        Context (T, H, D); logarithm (base 2) of the sum of the softmax, fp32 (H, T); the dropout mask as bits, int32
        (H, words per query, T), or None without dropout. The last two are undefined for tokens outside all sequences.
    """
    require_contiguous(starts=starts_S, lengths=lengths_S)
    tokens, _, heads, dimension = qkv_T3HD.shape
    tile = _tile("forward", qkv_T3HD)
    context_THD = qkv_T3HD.new_empty((tokens, heads, dimension))
    lse_HT = qkv_T3HD.new_empty((heads, tokens), dtype=torch.float32)
    mask_HWT = None
    if call.rate.THRESHOLD:
        mask_HWT = qkv_T3HD.new_empty((heads, _words(call), tokens), dtype=torch.int32)
    grid = _grid_with_gaps(triton.cdiv(call.max_length, tile.queries), qkv_T3HD, len(starts_S))
    kernels.attention_forward_kernel[grid](
        qkv_T3HD, starts_S, lengths_S, seed, context_THD, lse_HT, mask_HWT,
        tokens, len(starts_S), call.site, call.max_length, _words(call), dimension**-0.5,
        PAIRS=call.max_length % 2 == 0, GAP_ROWS=kernels.GAP_ROWS, **_constants(qkv_T3HD, call.rate, tile),
    )  # fmt: skip
    return context_THD, lse_HT, mask_HWT


class Target(NamedTuple):
    """The output buffers for the gradients of queries, keys and values.

    Attributes:
        memory: (T, 3, H, D) in the dtype of qkv, or e5m2 as bytes.
        scale: scale of e5m2 gradients, 0-d fp32; None otherwise.
        pending: buffer for the largest magnitude of e5m2 gradients, int32 (2,); None otherwise.
    """

    memory: Tensor
    scale: Tensor | None
    pending: Tensor | None

    @property
    def fp8(self) -> bool:
        return self.scale is not None


def gradient_in_fp8(d_context_THD: Tensor, scaling: Scaling) -> tuple[Target, Output]:
    """Compute the scale of e5m2 gradients and allocate them.

    Returns:
        The buffers for the gradient kernels, and the same memory as an output of shape (T, 3 * H * D).
    """
    tokens, heads, dimension = d_context_THD.shape
    dqkv8 = output(d_context_THD, 3 * heads * dimension, E5M2, scaling, half=False)
    assert dqkv8.data is not None
    scale = torch.empty_like(scaling.scale)
    kernels.attention_gradient_scale_kernel[(1,)](
        d_context_THD, scaling.scale, scale, dqkv8.scale_inverse, tokens,
        WIDTH=heads * dimension, SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED,
    )  # fmt: skip
    memory = dqkv8.data.view(torch.uint8).view(tokens, 3, heads, dimension)
    return Target(memory, scale, scaling.pending), dqkv8


def query_gradient(
    qkv_T3HD: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    context_THD: Tensor,
    d_context_THD: Tensor,
    lse_HT: Tensor,
    mask_HWT: Tensor | None,
    target: Target,
    call: AttentionCall,
    sums: bool,
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of the queries, and zeros outside all sequences, into the target.

    Returns:
        lse and delta, fp32 (2, H, T), for :func:`key_value_gradient`; partial sums of dq over tokens, fp32 (S * blocks,
        H * D), or None without ``sums``.
    """
    tokens, _, heads, dimension = qkv_T3HD.shape
    tile = _tile("query_gradient", qkv_T3HD)
    blocks = triton.cdiv(call.max_length, tile.queries)
    rows_2HT = lse_HT.new_empty((2, heads, tokens))
    partial = lse_HT.new_empty((len(starts_S) * blocks, heads * dimension)) if sums else None
    kernels.attention_query_gradient_kernel[_grid_with_gaps(blocks, qkv_T3HD, len(starts_S))](
        qkv_T3HD, starts_S, lengths_S, context_THD, d_context_THD, lse_HT, mask_HWT, *target, rows_2HT, partial,
        tokens, len(starts_S), _words(call), dimension**-0.5, SUMS=sums, FP8=target.fp8, GAP_ROWS=kernels.GAP_ROWS,
        **_constants(qkv_T3HD, call.rate, tile),
    )  # fmt: skip
    return rows_2HT, partial


def key_value_gradient(
    qkv_T3HD: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    d_context_THD: Tensor,
    rows_2HT: Tensor,
    mask_HWT: Tensor | None,
    target: Target,
    call: AttentionCall,
    sums: bool,
) -> Tensor | None:
    """Write the gradients of keys and values into the target.

    Returns:
        Partial sums of dk and dv over tokens, fp32 (S * blocks, 2 * H * D), or None without ``sums``.
    """
    tokens, _, heads, dimension = qkv_T3HD.shape
    tile = _tile("key_value_gradient", qkv_T3HD)
    blocks = triton.cdiv(call.max_length, tile.keys)
    partial = rows_2HT.new_empty((len(starts_S) * blocks, 2 * heads * dimension)) if sums else None
    kernels.attention_key_value_gradient_kernel[(blocks, heads, len(starts_S))](
        qkv_T3HD, starts_S, lengths_S, d_context_THD, rows_2HT, mask_HWT, *target, partial,
        tokens, _words(call), dimension**-0.5, SUMS=sums, FP8=target.fp8, **_constants(qkv_T3HD, call.rate, tile),
    )  # fmt: skip
    return partial


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_T3HD: Tensor, bias_3HD: Tensor | None, starts_S: Tensor, lengths_S: Tensor, seed: Tensor,
        call: AttentionCall, handover: Handover | None,
    ) -> Tensor:  # fmt: skip
        qkv_T3HD = qkv_T3HD.contiguous()
        context_THD, lse_HT, mask_HWT = forward(qkv_T3HD, starts_S, lengths_S, seed, call)
        ctx.save_for_backward(qkv_T3HD, starts_S, lengths_S, context_THD, lse_HT, mask_HWT)
        ctx.call, ctx.bias = call, None if bias_3HD is None else (bias_3HD.shape, bias_3HD.dtype)
        ctx.handover = handover
        return context_THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv_T3HD, starts_S, lengths_S, context_THD, lse_HT, mask_HWT = ctx.saved_tensors
        d_context_THD = gradients[0].contiguous()
        handover: Handover | None = ctx.handover
        dqkv8 = None
        if handover is None or handover.scaling is None:
            target = Target(torch.empty_like(qkv_T3HD), None, None)
        else:
            target, dqkv8 = gradient_in_fp8(d_context_THD, handover.scaling)
        sums = ctx.needs_input_grad[1]
        rows_2HT, dq_partial = query_gradient(
            qkv_T3HD, starts_S, lengths_S, context_THD, d_context_THD, lse_HT, mask_HWT, target, ctx.call, sums
        )
        dkv_partial = key_value_gradient(
            qkv_T3HD, starts_S, lengths_S, d_context_THD, rows_2HT, mask_HWT, target, ctx.call, sums
        )
        dqkv_T3HD = target.memory
        if handover is not None and dqkv8 is not None:
            kernels.attention_next_scale_kernel[(1,)](dqkv8.scale, dqkv8.pending)
            gradient8 = dqkv8.fp8(qkv_T3HD.dtype)
            assert gradient8 is not None
            dqkv_T3HD = handover.leave(gradient8).view(qkv_T3HD.shape)
        d_bias = None
        if dq_partial is not None and dkv_partial is not None:
            shape, dtype = ctx.bias
            d_bias = torch.cat([column_sums(dq_partial, dtype), column_sums(dkv_partial, dtype)]).view(shape)
        return dqkv_T3HD, d_bias, *(None,) * 5


def attention(
    qkv_T3HD: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    max_length: int,
    dropout: DropoutMask,
    bias_3HD: Tensor | None = None,
    *,
    handover: Handover | None = None,
) -> Tensor:
    """Return the context (T, H, D); see :func:`common.ops.attention.reference.attention_reference`.

    Args:
        qkv_T3HD: fp16, bf16 or fp32; D is one of ``HEAD_DIMS``.
        bias_3HD: its gradient is almost free: the kernels sum it from registers, without reading dqkv again.

    Raises:
        ValueError: the kernels do not support the head dimension.
    """
    if qkv_T3HD.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head dimension {qkv_T3HD.shape[3]} is none of {HEAD_DIMS}")
    call = AttentionCall(max_length, rate(dropout.p), dropout.site)
    result: Tensor = _Attention.apply(qkv_T3HD, bias_3HD, starts_S, lengths_S, dropout.seed, call, handover)
    return result
