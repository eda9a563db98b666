# mypy: allow-untyped-defs
"""Triton kernels of ``x + gate (delta + other + bias)`` over R rows of E features, in N samples of L rows.

Forward reads x and the products and writes the sum. Backward reads the gradient and the products and writes the
gradient of the products; that of x is the given gradient itself. A program owns some columns of a sample and walks over
tiles of its rows, so that it can add the terms of the gradients of gate and bias in registers. It writes one partial
sum of each, and :mod:`common.ops.tiling` adds these in a fixed order, without atomics.

Bytes at 8,192 rows of 3,072 in 16 bits with two products: forward 201 MB, 47 us at the 4.3 TB/s of an H200; backward
201 MB, 47 us, to FP8 176 MB, 41 us. With one product one tensor less, 50 MB and 12 us, each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.flux1.ops.gated_residual import leave, scaling_of
from common.ops.fp8_cast.device import begin, block_of_columns, finish_result, load_tile, store_result
from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Handover, Scaling
from common.ops.fp8_cast.triton import launch, output
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for, require_contiguous


@triton.jit
def _columns(given, block, E, BLOCK_E: tl.constexpr):
    """Return the columns of a block, the mask of the valid ones, and their bias (1, BLOCK_E)."""
    column, inside = block_of_columns(given, block, E, BLOCK_E)
    return column, inside, tl.load(given[2] + column, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _branch(given, columns, row, R, E):
    """Return ``delta + other + bias`` and the gate of a tile. ``given``: delta, other or None, bias, gate, its row
    stride, rows of a sample."""
    branch = load_tile(given[0], row, columns, R, E) + columns[2]
    if given[1] is not None:
        branch += load_tile(given[1], row, columns, R, E)
    mask = (row < R)[:, None] & columns[1][None, :]
    offset = (row // given[5])[:, None] * given[4] + columns[0][None, :]
    return branch, tl.load(given[3] + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gated_residual_forward(given, columns, inverse, row, R, E):
    """Return the sum. ``given``: see :func:`_branch`, then x."""
    branch, gate = _branch(given, columns, row, R, E)
    return ((load_tile(given[6], row, columns, R, E) + gate * branch, 0),), ()


@triton.jit
def gated_residual_backward(given, columns, inverse, row, R, E):
    """Return the gradient of the products, and the terms of the gate's. ``given``: see :func:`_branch`, then dy."""
    branch, gate = _branch(given, columns, row, R, E)
    dy = load_tile(given[6], row, columns, R, E)
    return ((gate * dy, 0),), ((dy * branch, 0),)


@triton.jit
def gated_residual_backward_kernel(
    given, output,  # inputs of the formula; gradient of the products
    of_gate_ptr,  # (P, N, E) fp32: partial gradients of the gate
    of_bias_ptr,  # (P, N, E) fp32: partial gradients of the bias
    R, E, N,
    BLOCKS: tl.constexpr, SAMPLED_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the products and partial sums. Grid (P * N * BLOCKS,)."""
    known, scale, peak = begin(
        output, 0, given, None, R, E, BLOCKS, _columns, gated_residual_backward, SAMPLED_ROWS, ROWS, BLOCK_E, GROUP
    )
    columns = _columns(given, tl.program_id(0) % BLOCKS, E, BLOCK_E)
    share = tl.program_id(0) // BLOCKS
    sample, tokens = share % N, given[5]
    d_gate = tl.zeros((ROWS, BLOCK_E), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for group in tl.range(share // N, tl.cdiv(tokens, ROWS), tl.num_programs(0) // (BLOCKS * N), num_stages=STAGES):
        token = group * ROWS + tl.arange(0, ROWS)
        row = tl.where(token < tokens, sample * tokens + token, R)
        parts, terms = gated_residual_backward(given, columns, None, row, R, E)
        peak = store_result(output, scale, peak, parts, columns, row, R, GROUP)
        d_gate += terms[0][0]
        d_bias += parts[0][0]
    target = share * E + columns[0]
    tl.store(of_gate_ptr + target, tl.sum(d_gate, 0), mask=columns[1])
    tl.store(of_bias_ptr + target, tl.sum(d_bias, 0), mask=columns[1])
    finish_result(output, known, scale, peak)


TILES: dict[str, Tile] = {
    "forward": Tile(rows=4, columns=1024, warps=8, programs=0, stages=1),
    "backward": Tile(rows=4, columns=1024, warps=8, programs=4, stages=3),
    "backward to fp8": Tile(rows=4, columns=1024, warps=8, programs=4, stages=3),
}
"""Tiles by pass."""


def forward(x_RE: Tensor, delta_RE: Tensor, other_RE: Tensor | None, bias_E: Tensor, gate_NE: Tensor) -> Tensor:
    """Return ``x + gate (delta + other + bias)``, (R, E). One launch."""
    rows, features = x_RE.shape
    written = output(x_RE, features, E5M2, None, half=True)
    given = (delta_RE, other_RE, bias_E, gate_NE, gate_NE.stride(0), rows // len(gate_NE), x_RE)
    launch(gated_residual_forward, TILES["forward"], given, rows, features, written, columns=_columns)
    assert written.half is not None
    return written.half


def backward(
    dy_RE: Tensor, delta_RE: Tensor, other_RE: Tensor | None, bias_E: Tensor, gate_NE: Tensor, fp8: Scaling | None
) -> tuple[Tensor | Fp8Tensor, Tensor, Tensor]:
    """Return the gradients of the products (R, E), in e5m2 if ``fp8``, of bias (E,) and of gate (N, E).

    Three launches; only the scale uses atomics.
    """
    (rows, features), samples = dy_RE.shape, len(gate_NE)
    tile, tokens = TILES["backward" if fp8 is None else "backward to fp8"], rows // samples
    block = min(tile.columns, triton.next_power_of_2(features))
    blocks = triton.cdiv(features, block)
    programs = programs_for(triton.cdiv(tokens, tile.rows), tile.programs, dy_RE.device, samples * blocks)
    written = output(dy_RE, features, E5M2, fp8, half=fp8 is None)
    of_gate, of_bias = dy_RE.new_empty((2, programs, samples * features), dtype=torch.float32)
    gated_residual_backward_kernel[(programs * samples * blocks,)](
        (delta_RE, other_RE, bias_E, gate_NE, gate_NE.stride(0), tokens, dy_RE), written, of_gate, of_bias,
        rows, features, samples,
        BLOCKS=blocks, SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED, ROWS=tile.rows, BLOCK_E=block, GROUP=min(8, block),
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    d_products = written.fp8(delta_RE.dtype) or written.half
    assert d_products is not None
    d_bias_E = column_sums(of_bias.view(-1, features), bias_E.dtype)
    return d_products, d_bias_E, column_sums(of_gate, gate_NE.dtype).view(samples, features)


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RE: Tensor, delta_RE: Tensor, other_RE: Tensor | None, bias_E: Tensor, gate_NE: Tensor,
        handovers: Sequence[Handover | None],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(delta_RE, other_RE, bias_E, gate_NE)
        ctx.handovers = handovers
        return forward(x_RE, delta_RE, other_RE, bias_E, gate_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RE: Tensor) -> tuple[Tensor | None, ...]:
        delta_RE, other_RE, bias_E, gate_NE = ctx.saved_tensors
        found, d_bias_E, d_gate_NE = backward(
            dy_RE.contiguous(), delta_RE, other_RE, bias_E, gate_NE, scaling_of(ctx.handovers)
        )
        d_RE = leave(ctx.handovers, found) if isinstance(found, Fp8Tensor) else found
        return dy_RE, d_RE, None if other_RE is None else d_RE, d_bias_E, d_gate_NE, None


def gated_residual(
    x_RE: Tensor,
    delta_RE: Tensor,
    other_RE: Tensor | None,
    bias_E: Tensor,
    gate_NE: Tensor,
    *,
    handovers: Sequence[Handover | None] = (),
) -> Tensor:
    """Return ``x + gate (delta + other + bias)``, (R, E).

    See :func:`benchmarks.flux1.ops.gated_residual.gated_residual_reference`.

    Raises:
        ValueError: a tensor or a row of the gate is not contiguous.
    """
    require_contiguous(x=x_RE, delta=delta_RE, other=other_RE, bias=bias_E, gate=gate_NE[0])
    result: Tensor = _GatedResidual.apply(x_RE, delta_RE, other_RE, bias_E, gate_NE, handovers)
    return result
