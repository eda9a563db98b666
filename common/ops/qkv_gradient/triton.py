"""The gradient of a product of heads through the Triton kernel of :mod:`common.ops.qkv_gradient.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes as in
:mod:`common.ops.qkv_gradient.reference`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS_OF_COMPUTED, Scaling
from common.ops.fp8_cast.triton import arguments, result
from common.ops.qkv_gradient import kernels
from common.ops.qkv_gradient.reference import QkvGradient, check, joined
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors

TILES: dict[str, Tile] = {"join": Tile(rows=64, warps=8, programs=4, stages=3)}
"""``rows``: tokens of one head in a tile."""


def join(
    dq_THD: Tensor,
    dk_THD: Tensor,
    dv_THD: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    transpose: bool = False,
    frozen_scales: bool = False,
) -> QkvGradient:
    """See :func:`common.ops.qkv_gradient.reference.join_reference`. Two launches, no atomics but for the scale."""
    check(dq_THD, dk_THD, dv_THD)
    tokens, heads, size = dq_THD.shape
    columns = 3 * heads * size
    there_TN = joined(dq_THD, dk_THD, dv_THD)
    d_qkv_TN = dq_THD.new_empty((tokens, columns)) if half and there_TN is None else None
    d_qkv8 = None if fp8 is None else result(fp8, E5M2, (tokens, columns))
    transposed = transpose and d_qkv8 is not None
    turned_NT = torch.empty((columns, tokens), dtype=E5M2, device=dq_THD.device) if transposed else None
    tile = TILES["join"]
    block = triton.next_power_of_2(size)
    programs = max(1, multiprocessors(dq_THD.device) * tile.programs // (3 * heads))
    programs = min(programs, triton.cdiv(tokens, tile.rows))
    partial = torch.empty((programs, columns), dtype=torch.float32, device=dq_THD.device)
    kernels.qkv_gradient_kernel[(3 * heads * programs,)](
        dq_THD, dk_THD, dv_THD, *dq_THD.stride()[:2], *dk_THD.stride()[:2], *dv_THD.stride()[:2],
        d_qkv_TN, *arguments(d_qkv8), None if turned_NT is None else turned_NT.view(torch.uint8), partial, tokens,
        H=heads, D=size, HALF=d_qkv_TN is not None, FP8=d_qkv8 is not None, TRANSPOSE=transposed,
        FROZEN=frozen_scales, SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED,
        BLOCK_T=tile.rows, BLOCK_D=block, GROUP=min(8, block), STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    in_fp8 = None if d_qkv8 is None else replace(d_qkv8.tensor(dq_THD.dtype), transposed=turned_NT)
    given_TN = (d_qkv_TN if there_TN is None else there_TN) if half else None
    return QkvGradient(given_TN, in_fp8, column_sums(partial, torch.float32))
