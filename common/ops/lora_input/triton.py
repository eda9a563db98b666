# mypy: allow-untyped-defs
"""Triton kernels of the dropout in front of an adapter, over T rows of E columns.

On an H200 at 8,192 tokens, E = 8192, 16 bits: dropout of x or of a norm's result moves 268 MB, 62 us at 4.3 TB/s. The
backward pass reads and writes dx, 268 MB, 62 us; its product with r = 16 is 2.1 GFLOP, 2 us.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.dropout.reference import DropoutMask
from common.ops.dropout.triton import keep_of_rows, mask_keys, rate
from common.ops.lora_input import WHOLE, Region
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def _tile(T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return rows, columns, element offsets and mask of this program's tile."""
    blocks = tl.cdiv(E, BLOCK_E)
    row = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(0) % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    return row, column, row.to(tl.int64)[:, None] * E + column[None, :], (row < T)[:, None] & (column < E)[None, :]


@triton.jit
def _masked(
    x, rows_ptr, seed_ptr, site, row, T, E, columns_total, column_offset,
    GIVEN: tl.constexpr, PAIRS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the tile with dropout applied: kept elements are scaled, the others are 0."""
    if GIVEN:
        number = tl.load(rows_ptr + row, mask=row < T, other=0)
    else:
        number = row.to(tl.int64)
    start = number * columns_total + column_offset + tl.program_id(0) % tl.cdiv(E, BLOCK_E) * BLOCK_E
    first, second = mask_keys(seed_ptr, site)
    keep = keep_of_rows(start.to(tl.uint32), BLOCK_E, PAIRS, first, second, THRESHOLD)
    return tl.where(keep, x * INVERSE_KEEP, 0.0)


@triton.jit(do_not_specialize=["site", "column_offset"])
def lora_input_dropped_kernel(
    x_ptr,  # (T, E); with NORM the input of the norm
    inverse_rms_ptr,  # (T,) fp32, if NORM
    weight_ptr,  # (E,), if NORM
    rows_ptr,  # (T,) int64, if GIVEN
    seed_ptr,  # 0-d int64
    y_ptr,  # (T, E)
    site, T, E, columns_total, column_offset,
    NORM: tl.constexpr, GIVEN: tl.constexpr, PAIRS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store a tile of x, or of the norm of x if NORM, with dropout. Grid (ceil(T / BLOCK_T) * ceil(E / BLOCK_E),)."""
    row, column, offset, mask = _tile(T, E, BLOCK_T, BLOCK_E)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.load(inverse_rms_ptr + row, mask=row < T, other=0.0)[:, None]
        x = x * tl.load(weight_ptr + column, mask=column < E, other=0.0).to(tl.float32)[None, :]
        x = x.to(y_ptr.dtype.element_ty).to(tl.float32)
    if THRESHOLD:
        x = _masked(
            x, rows_ptr, seed_ptr, site, row, T, E, columns_total, column_offset,
            GIVEN, PAIRS, THRESHOLD, INVERSE_KEEP, BLOCK_E,
        )  # fmt: skip
    tl.store(y_ptr + offset, x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["site", "column_offset"])
def lora_input_gradient_kernel(
    dx_ptr,  # (T, E), updated
    du_ptr,  # (T, R)
    a_ptr,  # (R, E)
    rows_ptr,  # (T,) int64, if GIVEN
    seed_ptr,  # 0-d int64
    site, T, E, columns_total, column_offset,
    R: tl.constexpr, GIVEN: tl.constexpr, PAIRS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add du A, masked by the dropout, to a tile of dx. Grid (ceil(T / BLOCK_T) * ceil(E / BLOCK_E),)."""
    row, column, offset, mask = _tile(T, E, BLOCK_T, BLOCK_E)
    rank = tl.arange(0, BLOCK_R)
    du = tl.load(
        du_ptr + row.to(tl.int64)[:, None] * R + rank[None, :], mask=(row < T)[:, None] & (rank < R)[None, :], other=0.0
    )
    a = tl.load(
        a_ptr + rank[:, None] * E + column[None, :], mask=(rank < R)[:, None] & (column < E)[None, :], other=0.0
    )
    gradient = tl.dot(du, a, input_precision="ieee")
    if THRESHOLD:
        gradient = _masked(
            gradient, rows_ptr, seed_ptr, site, row, T, E, columns_total, column_offset,
            GIVEN, PAIRS, THRESHOLD, INVERSE_KEEP, BLOCK_E,
        )  # fmt: skip
    dx = tl.load(dx_ptr + offset, mask=mask, other=0.0).to(tl.float32) + gradient
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


_LEAST_RANK = 16
"""Smallest size of a dimension in a tensor core product. Smaller ranks are padded with zeros."""


TILES: dict[str, Tile] = {
    "dropped": Tile(rows=4, columns=1024, warps=4),
    "gradient": Tile(rows=64, columns=128, warps=4),
}
"""Tile of each pass."""


def _launch(tile: Tile, x_TE: Tensor, mask: DropoutMask, region: Region) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid, and the keyword arguments that both kernels share."""
    tokens, columns = x_TE.shape
    total = columns if region.columns_total is None else region.columns_total
    block = max(2, min(tile.columns, triton.next_power_of_2(columns)))
    return (triton.cdiv(tokens, tile.rows) * triton.cdiv(columns, block),), {
        "rows_ptr": region.rows,
        "seed_ptr": mask.seed,
        "site": mask.site,
        "T": tokens,
        "E": columns,
        "columns_total": total,
        "column_offset": region.column_offset,
        "GIVEN": region.rows is not None,
        "PAIRS": total % 2 == 0 and region.column_offset % 2 == 0,
        **rate(mask.p)._asdict(),
        "BLOCK_T": tile.rows,
        "BLOCK_E": block,
        "num_warps": tile.warps,
    }


def dropped(x_TE: Tensor, mask: DropoutMask, region: Region = WHOLE) -> Tensor:
    """Return dropout of x, (T, E); see :func:`common.ops.lora_input.dropped_reference`. One launch."""
    if mask.p == 0.0:
        return x_TE
    require_contiguous(x=x_TE, rows=region.rows)
    y_TE = torch.empty_like(x_TE)
    grid, arguments = _launch(TILES["dropped"], x_TE, mask, region)
    lora_input_dropped_kernel[grid](x_TE, inverse_rms_ptr=None, weight_ptr=None, y_ptr=y_TE, NORM=False, **arguments)
    return y_TE


def dropped_norm(
    residual_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor, mask: DropoutMask, region: Region = WHOLE
) -> Tensor:
    """Return dropout of the norm's result, (T, E).

    See :func:`common.ops.lora_input.dropped_norm_reference`. One launch.
    """
    require_contiguous(residual=residual_TE, inverse_rms=inverse_rms_T, weight=weight_E, rows=region.rows)
    y_TE = torch.empty_like(residual_TE)
    grid, arguments = _launch(TILES["dropped"], residual_TE, mask, region)
    lora_input_dropped_kernel[grid](
        residual_TE, inverse_rms_ptr=inverse_rms_T, weight_ptr=weight_E, y_ptr=y_TE, NORM=True, **arguments
    )
    return y_TE


def add_input_gradient(dx_TE: Tensor, du_Tr: Tensor, a_rE: Tensor, mask: DropoutMask, region: Region = WHOLE) -> Tensor:
    """Add the adapter's part to ``dx_TE`` in place, and return it.

    See :func:`common.ops.lora_input.add_input_gradient_reference`. One launch.

    Raises:
        ValueError: the factors have different dtypes.
    """
    require_contiguous(dx=dx_TE, du=du_Tr, a=a_rE, rows=region.rows)
    if du_Tr.dtype != a_rE.dtype:
        raise ValueError(f"the factors of a product have one dtype, not {du_Tr.dtype} and {a_rE.dtype}")
    grid, arguments = _launch(TILES["gradient"], dx_TE, mask, region)
    lora_input_gradient_kernel[grid](
        dx_TE, du_Tr, a_rE, R=a_rE.shape[0], BLOCK_R=max(_LEAST_RANK, triton.next_power_of_2(a_rE.shape[0])),
        **arguments,
    )  # fmt: skip
    return dx_TE
