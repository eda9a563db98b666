"""Products with the Triton kernels of this package.

Gradients that are sums take two launches, everything else one. Shapes: those of
:mod:`benchmarks.rgat.ops.projection`; S splits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops.projection import kernels, tables
from benchmarks.rgat.ops.projection.reference import (
    MOST_COLUMNS,
    Projected,
    check_gradient_level,
    check_level,
    check_parts,
)
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors, require_contiguous

_LEAST = 16
"""Smallest side of a matrix product on tensor cores; smaller sides are padded with zeros."""

_SUMMED = 1024
"""Elements per program when partial sums are added."""


TILES: dict[str, Tile] = {
    "rows": Tile(rows=128, columns=256, depth=64, warps=8, stages=4),
    "weight_gradient": Tile(rows=64, columns=256, depth=128, warps=8, stages=4, programs=8),
    "terms": Tile(rows=256, depth=64, warps=8, stages=3),
    "terms_gradient": Tile(rows=32, depth=256, warps=4, stages=3, programs=8),
    "input_gradient": Tile(rows=128, columns=128, depth=64, warps=4, stages=3),
}
"""Tile of each kernel."""

FP32_TILES: dict[str, Tile] = {
    "rows": Tile(rows=64, columns=64, depth=32, warps=4, stages=2),
    "weight_gradient": Tile(rows=32, columns=64, depth=64, warps=4, stages=2, programs=8),
    "terms": Tile(rows=64, depth=32, warps=4, stages=2),
    "terms_gradient": Tile(rows=32, depth=64, warps=4, stages=2, programs=8),
    "input_gradient": Tile(rows=64, columns=64, depth=32, warps=4, stages=2),
}
"""Tile of each kernel for fp32 factors, which take twice the memory and do not use tensor cores."""


def _tile(kernel: str, dtype: torch.dtype) -> Tile:
    return (FP32_TILES if dtype == torch.float32 else TILES)[kernel]


def _block(size: int, most: int) -> int:
    """Return the side of a tile: a power of two, not larger than ``size`` needs."""
    return max(_LEAST, min(most, triton.next_power_of_2(size)))


def _whole_heads(columns: int, head_size: int) -> int:
    """Return the maximum columns of a tile of z, such that no tile ends within a head."""
    return max(columns, head_size) if head_size & (head_size - 1) == 0 else MOST_COLUMNS


def _vectors(x: Tensor) -> Tensor:
    return x.float().contiguous()


def project(x_NK: Tensor, block: SampledBlock, level: int, weight_RKD: Tensor, att_source_RAd: Tensor) -> Projected:
    """Return z (M, D), the rows times their relation's weight, and source terms (M, A).

    See :func:`benchmarks.rgat.ops.projection.reference.project_reference`. Takes one launch.
    """
    require_contiguous(x=x_NK, weight=weight_RKD)
    shape, device = block.shape, x_NK.device
    check_level(shape, level, x_NK)
    (_, inputs, outputs), (heads, head_size) = weight_RKD.shape, att_source_RAd.shape[1:]
    tile, capacity = _tile("rows", weight_RKD.dtype), shape.row_offsets(level)[-1]
    cut = tables.tiles(shape.rows[level - 1], tile.rows, device)
    columns = _block(outputs, _whole_heads(tile.columns, head_size))
    found = Projected(weight_RKD.new_empty((capacity, outputs)), x_NK.new_empty((capacity, heads), dtype=torch.float32))
    if len(cut.table):
        kernels.projection_rows_kernel[(len(cut.table) * triton.cdiv(outputs, columns),)](
            x_NK, block.rows, block.row_counts[level - 1], weight_RKD, _vectors(att_source_RAd), *found,
            tables.relations(shape, level, device), cut.table, K=inputs, D=outputs, A=heads,
            BLOCK_M=tile.rows, BLOCK_K=_block(inputs, tile.depth), BLOCK_D=columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return found


def weight_gradient(x_NK: Tensor, dz_MD: Tensor, block: SampledBlock, level: int, out_dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weights, (R, K, D) in ``out_dtype``.

    See :func:`benchmarks.rgat.ops.projection.reference.weight_gradient_reference`. Takes two launches.
    """
    require_contiguous(x=x_NK, dz=dz_MD)
    shape, device = block.shape, x_NK.device
    check_level(shape, level, x_NK)
    check_parts("dz", dz_MD, shape.row_offsets(level)[-1])
    inputs, outputs, relations = x_NK.shape[1], dz_MD.shape[1], len(shape.schema.relations)
    tile = _tile("weight_gradient", dz_MD.dtype)
    depth, columns = _block(inputs, tile.depth), _block(outputs, tile.columns)
    tiles = triton.cdiv(inputs, depth) * triton.cdiv(outputs, columns)
    chunk = _chunk(tile, len(dz_MD), tiles, device)
    cut = tables.tiles(shape.rows[level - 1], chunk, device)
    partial_SKD = x_NK.new_empty((len(cut.table), inputs, outputs), dtype=torch.float32)
    counts = block.row_counts[level - 1]
    if len(cut.table):
        kernels.projection_weight_gradient_kernel[(len(cut.table) * tiles,)](
            x_NK, block.rows, counts, dz_MD, partial_SKD, tables.relations(shape, level, device), cut.table, chunk,
            K=inputs, D=outputs, EARLY=int(x_NK.element_size() == 1),
            BLOCK_M=tile.rows, BLOCK_K=depth, BLOCK_D=columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    lines = tuple((relation, cut.firsts[relation], cut.of_part[relation], 0) for relation in range(relations))
    return _sums(partial_SKD, outputs, counts, lines, chunk, out_dtype)


def target_terms(x_NK: Tensor, block: SampledBlock, level: int, v_RKA: Tensor) -> Tensor:
    """Return the terms (T, A) fp32 that targets add to the logits of their edges.

    See :func:`benchmarks.rgat.ops.projection.reference.target_terms_reference`. Takes one launch.
    """
    require_contiguous(x=x_NK)
    shape, device = block.shape, x_NK.device
    check_level(shape, level, x_NK)
    _, inputs, heads = v_RKA.shape
    tile, columns = _tile("terms", x_NK.dtype), tables.into(shape, heads, device)
    cut = tables.tiles(tables.target_capacities(shape, level), tile.rows, device)
    term_TA = x_NK.new_empty((shape.target_offsets(level)[-1], heads), dtype=torch.float32)
    if len(cut.table):
        kernels.projection_terms_kernel[(len(cut.table),)](
            x_NK, block.node_counts[level - 1], _vectors(v_RKA), term_TA, tables.relations(shape, level, device),
            columns.table, tables.node_offsets(shape, level, device), cut.table,
            K=inputs, A=heads, COLUMNS=columns.columns, PRODUCT=_product(x_NK),
            BLOCK_T=tile.rows, BLOCK_K=_block(inputs, tile.depth), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return term_TA


def target_terms_gradient(x_NK: Tensor, dterm_TA: Tensor, block: SampledBlock, level: int) -> Tensor:
    """Return the gradient (R, K, A) fp32 of ``v_RKA``.

    See :func:`benchmarks.rgat.ops.projection.reference.target_terms_gradient_reference`. Takes two launches.
    """
    require_contiguous(x=x_NK, dterm=dterm_TA)
    shape, device = block.shape, x_NK.device
    check_level(shape, level, x_NK)
    check_parts("dterm", dterm_TA, shape.target_offsets(level)[-1])
    inputs, heads = x_NK.shape[1], dterm_TA.shape[1]
    # gradients may underflow in fp16, so fp16 inputs are converted to fp32 instead
    fp32 = x_NK.dtype in (torch.float16, torch.float32)
    tile, columns = _tile("terms_gradient", torch.float32 if fp32 else x_NK.dtype), tables.into(shape, heads, device)
    depth, capacities = _block(inputs, tile.depth), tables.target_capacities(shape, level)
    tiles = triton.cdiv(inputs, depth)
    chunk = _chunk(tile, sum(capacities), tiles, device)
    cut = tables.tiles(capacities, chunk, device)
    partial_SKC = x_NK.new_empty((len(cut.table), inputs, columns.columns), dtype=torch.float32)
    counts = block.node_counts[level - 1]
    if len(cut.table):
        kernels.projection_terms_gradient_kernel[(len(cut.table) * tiles,)](
            x_NK, counts, dterm_TA, partial_SKC, tables.relations(shape, level, device), columns.table,
            tables.node_offsets(shape, level, device), cut.table, chunk,
            K=inputs, A=heads, COLUMNS=columns.columns, PRODUCT=triton.language.float32 if fp32 else _product(x_NK),
            PRECISION="ieee" if x_NK.dtype == torch.float32 else "tf32", BLOCK_T=tile.rows, BLOCK_K=depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    lines = tuple(
        (target, cut.firsts[target], cut.of_part[target], columns.firsts[relation])
        for relation, target in enumerate(shape.schema.targets)
    )
    return _sums(partial_SKC, heads, counts, lines, chunk, torch.float32)


def input_gradient(
    dz_MD: Tensor, dterm_TA: Tensor, block: SampledBlock, level: int, weight_RKD: Tensor, v_RKA: Tensor
) -> Tensor:
    """Return the gradient of the inputs, (N, K).

    See :func:`benchmarks.rgat.ops.projection.reference.input_gradient_reference`. Takes one launch.
    """
    require_contiguous(dz=dz_MD, dterm=dterm_TA, weight=weight_RKD)
    shape, device = block.shape, dz_MD.device
    check_gradient_level(shape, level)
    check_parts("dz", dz_MD, shape.row_offsets(level)[-1])
    check_parts("dterm", dterm_TA, shape.target_offsets(level)[-1])
    (_, inputs, outputs), heads = weight_RKD.shape, v_RKA.shape[2]
    tile = _tile("input_gradient", dz_MD.dtype)
    columns, origins = tables.into(shape, heads, device), tables.from_types(shape, level, device)
    cut, width = tables.tiles(shape.nodes[level], tile.rows, device), _block(inputs, tile.columns)
    dx_NK = dz_MD.new_empty((shape.node_offsets(level)[-1], inputs))
    if len(cut.table):
        kernels.projection_input_gradient_kernel[(len(cut.table) * triton.cdiv(inputs, width),)](
            dz_MD, dterm_TA, block.node_row, block.node_counts[level], block.row_counts[level - 1],
            block.node_counts[level - 1], weight_RKD, _vectors(v_RKA), dx_NK, tables.relations(shape, level, device),
            origins.indptr, origins.relations, columns.table, tables.node_offsets(shape, level, device), cut.table,
            K=inputs, D=outputs, A=heads, COLUMNS=columns.columns,
            PRECISION="ieee" if dz_MD.dtype == torch.float32 else "tf32",
            BLOCK_N=tile.rows, BLOCK_K=width, BLOCK_D=_block(outputs, tile.depth),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return dx_NK


def _product(x: Tensor) -> triton.language.dtype:
    """Return the dtype in which inputs are multiplied."""
    return {torch.float32: triton.language.float32, torch.float16: triton.language.float16}.get(
        x.dtype, triton.language.bfloat16
    )


def _chunk(tile: Tile, rows: int, tiles: int, device: torch.device) -> int:
    """Return the rows per split, in whole tiles, so that splits times ``tiles`` programs fill the device."""
    splits = max(1, multiprocessors(device) * tile.programs // tiles)
    return triton.cdiv(max(rows, 1), splits * tile.rows) * tile.rows


def _sums(
    partial_SKP: Tensor,
    width: int,
    counts: Tensor,
    lines: tuple[tuple[int, int, int, int], ...],
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the sum of each relation's partial sums, (R, K, ``width``)."""
    _, inputs, columns = partial_SKP.shape
    sums_RKW = partial_SKP.new_empty((len(lines), inputs, width), dtype=dtype)
    kernels.projection_sums_kernel[(triton.cdiv(inputs * width, _SUMMED), len(lines))](
        partial_SKP, sums_RKW, counts, tables.parts(lines, partial_SKP.device), chunk,
        K=inputs, P=columns, W=width, BLOCK=_SUMMED, num_warps=4,
    )  # fmt: skip
    return sums_RKW
