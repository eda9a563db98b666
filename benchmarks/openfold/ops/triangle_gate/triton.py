# mypy: allow-untyped-defs
"""Triton kernels of the factors of the triangle multiplication. Shapes: P pairs, C channels.

A program reads a tile of projections and gates, pairs by channels, and writes it transposed; in backward the reverse.

At 65,536 pairs, 128 channels and 16 bits: forward 101 MB, backward 168 MB.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def _tile(projected_ptr, mask_ptr, P, FACTOR: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr,
          BLOCK_C: tl.constexpr):  # fmt: skip
    """Return projection, gate and pair mask of a factor, fp32, their offsets, and those in the channel-first factor."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (pair < P)[:, None] & (channel < C)[None, :]
    at = pair.to(tl.int64)[:, None] * (4 * C) + 2 * FACTOR * C + channel[None, :]
    projection = tl.load(projected_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.load(projected_ptr + at + C, mask=inside, other=0.0).to(tl.float32))
    exists = tl.load(mask_ptr + pair, mask=pair < P, other=0).to(tl.float32)[:, None]
    transposed_at = channel.to(tl.int64)[:, None] * P + pair[None, :]
    return projection, gate, exists, at, inside, transposed_at


@triton.jit
def triangle_gate_forward_kernel(
    projected_ptr,  # (P, 4, C)
    mask_ptr,  # (P,)
    a_ptr, b_ptr,  # (C, P)
    P,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a tile of both factors. Grid (ceil(P / BLOCK_P), ceil(C / BLOCK_C))."""
    for factor in tl.static_range(2):
        projection, gate, exists, _, inside, at = _tile(projected_ptr, mask_ptr, P, factor, C, BLOCK_P, BLOCK_C)
        value = tl.trans((projection * gate * exists).to(a_ptr.dtype.element_ty))
        tl.store((a_ptr if factor == 0 else b_ptr) + at, value, mask=tl.trans(inside))


@triton.jit
def triangle_gate_backward_kernel(
    projected_ptr,  # (P, 4, C)
    mask_ptr,  # (P,)
    da_ptr, db_ptr,  # (C, P)
    d_projected_ptr,  # (P, 4, C)
    P,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a tile of the gradients of projections and gates. Grid (ceil(P / BLOCK_P), ceil(C / BLOCK_C))."""
    for factor in tl.static_range(2):
        projection, gate, exists, at, inside, transposed_at = _tile(
            projected_ptr, mask_ptr, P, factor, C, BLOCK_P, BLOCK_C
        )
        d_value = tl.load((da_ptr if factor == 0 else db_ptr) + transposed_at, mask=tl.trans(inside), other=0.0)
        d_projection = tl.trans(d_value).to(tl.float32) * exists * gate
        d_gate = d_projection * projection * (1.0 - gate)
        tl.store(d_projected_ptr + at, d_projection.to(d_projected_ptr.dtype.element_ty), mask=inside)
        tl.store(d_projected_ptr + at + C, d_gate.to(d_projected_ptr.dtype.element_ty), mask=inside)


TILES: dict[str, Tile] = {
    "forward": Tile(rows=64, columns=64, warps=4),
    "backward": Tile(rows=64, columns=64, warps=4),
}


def _launch(name: str, projected_P4C: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the size arguments of a pass."""
    pairs, channels = projected_P4C.shape[0], projected_P4C.shape[1] // 4
    tile = TILES[name]
    block_c = min(tile.columns, triton.next_power_of_2(channels))
    grid = triton.cdiv(pairs, tile.rows), triton.cdiv(channels, block_c)
    return grid, {"C": channels, "BLOCK_P": tile.rows, "BLOCK_C": block_c, "num_warps": tile.warps}


def forward(projected_P4C: Tensor, mask_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors, (C, P) each. One launch."""
    require_contiguous(projected=projected_P4C, mask=mask_P)
    pairs = len(projected_P4C)
    grid, arguments = _launch("forward", projected_P4C)
    a_CP, b_CP = (projected_P4C.new_empty(arguments["C"], pairs) for _ in range(2))
    triangle_gate_forward_kernel[grid](projected_P4C, mask_P, a_CP, b_CP, pairs, **arguments)
    return a_CP, b_CP


def backward(projected_P4C: Tensor, mask_P: Tensor, da_CP: Tensor, db_CP: Tensor) -> Tensor:
    """Return the gradient of ``projected``, (P, 4 C). One launch."""
    d_projected_P4C = torch.empty_like(projected_P4C)
    grid, arguments = _launch("backward", projected_P4C)
    triangle_gate_backward_kernel[grid](
        projected_P4C, mask_P, da_CP.contiguous(), db_CP.contiguous(), d_projected_P4C, len(projected_P4C), **arguments
    )
    return d_projected_P4C


class _TriangleGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected_P4C: Tensor, mask_P: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(projected_P4C, mask_P)
        return forward(projected_P4C, mask_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        projected_P4C, mask_P = ctx.saved_tensors
        return backward(projected_P4C, mask_P, *gradients), None


def triangle_gate(projected_P4C: Tensor, mask_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors a and b, (C, P) each.

    See :func:`benchmarks.openfold.ops.triangle_gate.triangle_gate_reference`.

    Raises:
        ValueError: an argument is not contiguous.
    """
    result: tuple[Tensor, Tensor] = _TriangleGate.apply(projected_P4C, mask_P)
    return result
