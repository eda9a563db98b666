"""Edge attention with Triton kernels; see :mod:`benchmarks.rgat.ops.edge_attention`.

Grids have the size of the capacities, and programs for unfilled entries end at once.

Device tables map the programs of a launch to parts of a block: each node type or relation has a range of programs.
Types with most relations into them come first, so that the longest programs do not run at the end of a launch. The
first call for a shape copies its tables to the device. Tables stay cached forever, because captured graphs keep
reading them; a run has only a few shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock, device_table
from benchmarks.rgat.ops.edge_attention import backward_kernels, kernels
from common.ops.dropout.reference import DropoutMask, scale_of_kept, threshold
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


class ByKind(NamedTuple):
    """Programs of a launch over node types, or over the relations into them.

    Attributes:
        kinds: [types, 7]: first program; first output node; index of the node count in ``SampledBlock.counts``;
            capacity of nodes; first record in ``relations``; number of records; index of the type.
        relations: [R, 5]: index of the relation; its offset in ``indptr``, in edges, in the rows of the level and in
            the targets of the level.
        partials: [R, 3]: first program of a relation, distance to its next one, number of its programs; for summing
            their partial results.
    """

    kinds: Tensor
    relations: Tensor
    partials: Tensor
    programs: int


class ByRelation(NamedTuple):
    """Programs of a launch over rows, or over chunks of ``row_edges``.

    Attributes:
        relations: [R, 9]: first program; index of the relation; its offset in edges, in ``row_indptr``, in the rows
            of the level and in chunks; first output node of its target type; indices of its row count and edge count
            in ``SampledBlock.counts``. Relations with the most edges per row come first.
    """

    relations: Tensor
    programs: int
    chunks: int


def edge_counts_offset(shape: BlockShape, level: int) -> int:
    """Return the offset of the relations' edge counts at ``level`` in ``SampledBlock.counts``."""
    return (shape.hops + 1) * len(shape.schema.types) + (level - 1) * len(shape.schema.relations)


def _on(device: torch.device, records: Sequence[Sequence[int]]) -> Tensor:
    return device_table(records, torch.int32, device)


@functools.cache
def by_kind(shape: BlockShape, level: int, device: torch.device, nodes: int, each_relation: bool) -> ByKind:
    """Return programs with ``nodes`` consecutive nodes of a type each.

    Args:
        level: level of the rows.
        nodes: nodes per program.
        each_relation: whether every relation into a type has separate programs; those with the same nodes are
            neighbours.
    """
    schema, capacities = shape.schema, shape.nodes[level - 1]
    order = sorted(range(len(capacities)), key=lambda kind: -len(schema.into(kind)))
    kinds: list[list[int]] = []
    relations: list[list[int]] = []
    partials = [[0, 1, 0] for _ in schema.relations]
    programs = 0
    for kind in order:
        into = schema.into(kind)
        node_count = (level - 1) * len(capacities) + kind
        first_node = shape.node_offsets(level - 1)[kind]
        kinds.append([programs, first_node, node_count, capacities[kind], len(relations), len(into), kind])
        ranges, per_range = -(-capacities[kind] // nodes), len(into) if each_relation else 1
        for number, relation in enumerate(into):
            partials[relation] = [programs + (number if each_relation else 0), per_range, ranges]
            offsets = (shape.indptr_offsets, shape.edge_offsets, shape.row_offsets(level), shape.target_offsets(level))
            relations.append([relation, *(table[relation] for table in offsets)])
        programs += ranges * per_range
    return ByKind(_on(device, kinds), _on(device, relations), _on(device, partials), programs)


@functools.cache
def by_relation(
    shape: BlockShape, level: int, device: torch.device, chunk: int, *, rows: int = 0, group: int = 0
) -> ByRelation:
    """Return programs with ``rows`` rows of a relation at ``level`` each, or with ``group`` chunks of ``row_edges``.

    Args:
        chunk: entries per chunk.
        rows, group: rows or chunks per program; exactly one of them is given.
    """
    schema, edges = shape.schema, shape.edges[-1]
    edge_counts = edge_counts_offset(shape, level)
    row_counts = edge_counts + shape.hops * len(schema.relations)
    records, programs, chunks = [], 0, 0
    for relation in sorted(range(len(edges)), key=lambda one: -edges[one] / max(shape.rows[-1][one], 1)):
        offsets = shape.edge_offsets, shape.row_indptr_offsets, shape.row_offsets(level)
        starts = [table[relation] for table in offsets]
        first_node = shape.node_offsets(level - 1)[schema.targets[relation]]
        counts = row_counts + relation, edge_counts + relation
        records.append([programs, relation, *starts, chunks, first_node, *counts])
        own = -(-edges[relation] // chunk)
        chunks += own
        programs += -(-shape.rows[level - 1][relation] // rows) if rows else -(-own // group)
    return ByRelation(_on(device, records), programs, chunks)


_SUMS = (256, 16)
"""Rows and columns of partial results that a program adds up at once."""

CHUNK = 64
"""Entries of the transposed index that are summed sequentially."""


TILES: dict[str, Tile] = {
    "forward": Tile(items=1, edges=4, warps=1),
    "gradient": Tile(items=64, edges=4, warps=4),
    "targets": Tile(items=32, edges=8, warps=1),
    "chunks": Tile(items=1, edges=4, warps=1),
    "long_rows": Tile(items=32, edges=32, warps=4),
    "rows": Tile(items=1, edges=1, warps=1),
}
"""Tile of each pass; 1 where the kernel fixes a number.

- ``items``: nodes, targets, chunks or rows per program;
- ``edges``: edges of an item in registers at once; for ``gradient`` nodes, for ``long_rows`` chunks."""


def _widths(heads: int, columns: int) -> dict[str, int]:
    """Return the constants of all kernels that process heads.

    Raises:
        ValueError: the number of heads is not a power of two or does not divide the columns.
    """
    if heads & (heads - 1) or columns % heads:
        raise ValueError(f"{heads} heads for {columns} features: a power of two that divides them")
    return {"A": heads, "WIDTH": columns // heads, "BLOCK_D": triton.next_power_of_2(columns // heads)}


class _Finish(NamedTuple):
    """Activation and dropout as kernel arguments; ``site`` is that of the first type."""

    seed: Tensor | None
    site: int
    slope: float
    constants: dict[str, Any]


def _finish(types: int, activation_slope: float | None, dropout: DropoutMask | None) -> _Finish:
    p = 0.0 if dropout is None else dropout.p
    constants = {
        "ACTIVATION": activation_slope is not None,
        "THRESHOLD": threshold(p),
        "INVERSE_KEEP": scale_of_kept(p),
    }
    slope = 1.0 if activation_slope is None else activation_slope
    if dropout is None or not constants["THRESHOLD"]:
        return _Finish(None, 0, slope, constants)
    return _Finish(dropout.seed, dropout.site * types, slope, constants)


def forward(
    z_MD: Tensor,
    source_term_MA: Tensor,
    target_term_TA: Tensor,
    bias_RD: Tensor,
    block: SampledBlock,
    level: int,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (P, D), and the log-sum-exp (T, A) of each target's edges per relation.

    See :func:`benchmarks.rgat.ops.edge_attention.reference.forward_reference`. Takes one launch.
    """
    require_contiguous(z=z_MD, source_term=source_term_MA, target_term=target_term_TA, bias=bias_RD)
    tile, heads, columns = TILES["forward"], source_term_MA.shape[1], z_MD.shape[1]
    table = by_kind(block.shape, level, z_MD.device, tile.items, False)
    out_PD = z_MD.new_empty((block.shape.node_offsets(level - 1)[-1], columns))
    log_sum_TA = torch.empty_like(target_term_TA)
    finish = _finish(len(block.shape.schema.types), activation_slope, dropout)
    kernels.edge_attention_forward_kernel[(table.programs,)](
        z_MD, source_term_MA, target_term_TA, bias_RD, out_PD, log_sum_TA,
        block.counts, block.indptr, block.edge_row, table.kinds, table.relations,
        finish.seed, finish.site, slope, finish.slope,
        **_widths(heads, columns), **finish.constants, KINDS=len(table.kinds), EDGES=tile.edges, num_warps=tile.warps,
    )  # fmt: skip
    return out_PD, log_sum_TA


def backward(
    dout_PD: Tensor,
    out_PD: Tensor,
    z_MD: Tensor,
    source_term_MA: Tensor,
    target_term_TA: Tensor,
    log_sum_TA: Tensor,
    att_source_RAd: Tensor,
    block: SampledBlock,
    level: int,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, of the target terms, of the bias and of ``att_source_RAd``.

    See :func:`benchmarks.rgat.ops.edge_attention.reference.backward_reference`. Always bitwise reproducible.
    """
    require_contiguous(
        dout=dout_PD, out=out_PD, z=z_MD, source_term=source_term_MA, target_term=target_term_TA, log_sum=log_sum_TA,
        att_source=att_source_RAd,
    )  # fmt: skip
    widths = _widths(source_term_MA.shape[1], z_MD.shape[1])
    finish = _finish(len(block.shape.schema.types), activation_slope, dropout)
    gradient_PD, dbias_RD = _through_finish(dout_PD, out_PD, block, level, finish)
    shares_E2A = source_term_MA.new_empty((len(block.edge_row), 2, widths["A"]))
    dtarget_term_TA = torch.empty_like(target_term_TA)

    tile = TILES["targets"]
    table = by_kind(block.shape, level, z_MD.device, tile.items, True)
    partial = shares_E2A.new_empty((table.programs, z_MD.shape[1]))
    backward_kernels.edge_attention_targets_kernel[(table.programs,)](
        gradient_PD, z_MD, source_term_MA, target_term_TA, log_sum_TA, dtarget_term_TA, shares_E2A, partial,
        block.counts, block.indptr, block.edge_row, table.kinds, table.relations,
        edge_counts_offset(block.shape, level), slope,
        **widths, KINDS=len(table.kinds), TARGETS=tile.items, EDGES=tile.edges, num_warps=tile.warps,
    )  # fmt: skip
    datt_source_RAd = _sums(partial, table).view(att_source_RAd.shape)
    dz_MD = _by_row(gradient_PD, shares_E2A, att_source_RAd, z_MD, block, level, widths)
    return dz_MD, dtarget_term_TA, dbias_RD, datt_source_RAd


def _through_finish(
    dout_PD: Tensor, out_PD: Tensor, block: SampledBlock, level: int, finish: _Finish
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sums over relations, in the dtype of dout, and its sum per relation.

    Only filled entries of the gradient are defined.
    """
    tile, columns = TILES["gradient"], dout_PD.shape[1]
    table = by_kind(block.shape, level, dout_PD.device, tile.items, False)
    partial = dout_PD.new_empty((table.programs, columns), dtype=torch.float32)
    same = not (finish.constants["ACTIVATION"] or finish.constants["THRESHOLD"])
    gradient_PD = dout_PD if same else torch.empty_like(dout_PD)
    backward_kernels.edge_attention_gradient_kernel[(table.programs,)](
        dout_PD, out_PD, gradient_PD, partial, block.counts, table.kinds, finish.seed, finish.site, finish.slope,
        D=columns, BLOCK_D=triton.next_power_of_2(columns), **finish.constants, KINDS=len(table.kinds),
        NODES=tile.items, BLOCK=tile.edges, num_warps=tile.warps,
    )  # fmt: skip
    return gradient_PD, _sums(partial, table)


def _sums(partial: Tensor, table: ByKind) -> Tensor:
    """Return the sum of the partial results of each relation's programs, (R, D)."""
    relations, columns = len(table.partials), partial.shape[1]
    sums_RD = partial.new_empty((relations, columns))
    rows, block = _SUMS
    backward_kernels.edge_attention_sums_kernel[(relations, triton.cdiv(columns, block))](
        partial, sums_RD, table.partials, columns, ROWS=rows, BLOCK_D=block, num_warps=8
    )
    return sums_RD


def _by_row(
    gradient_PD: Tensor,
    shares_E2A: Tensor,
    att_source_RAd: Tensor,
    z_MD: Tensor,
    block: SampledBlock,
    level: int,
    widths: dict[str, int],
) -> Tensor:
    """Return dz_MD, computed with the transposed index."""
    shape, device, chunks_tile, long_tile, rows_tile = (
        block.shape, z_MD.device, TILES["chunks"], TILES["long_rows"], TILES["rows"]
    )  # fmt: skip
    table = by_relation(shape, level, device, CHUNK, group=chunks_tile.items)
    constants = {**widths, "RELATIONS": len(table.relations), "CHUNK": CHUNK}
    partial = shares_E2A.new_empty((table.chunks, z_MD.shape[1]))
    partial_term = shares_E2A.new_empty((table.chunks, widths["A"]))
    behind = block.row_edges.new_empty(table.chunks)
    backward_kernels.edge_attention_chunks_kernel[(table.programs,)](
        gradient_PD, shares_E2A, partial, partial_term, behind,
        block.counts, block.row_indptr, block.edge_row, block.edge_target, block.row_edges, table.relations,
        **constants, GROUP=chunks_tile.items, EDGES=chunks_tile.edges, num_warps=chunks_tile.warps,
    )  # fmt: skip
    table = by_relation(shape, level, device, CHUNK, group=long_tile.items)
    backward_kernels.edge_attention_long_rows_kernel[(table.programs, widths["A"])](
        partial, partial_term, behind, block.counts, block.row_indptr, block.row_edges, table.relations,
        **constants, GROUP=long_tile.items, CHUNKS=long_tile.edges, num_warps=long_tile.warps,
    )  # fmt: skip
    table = by_relation(shape, level, device, CHUNK, rows=rows_tile.items)
    dz_MD = torch.empty_like(z_MD)
    backward_kernels.edge_attention_rows_kernel[(table.programs,)](
        gradient_PD, shares_E2A, att_source_RAd, partial, partial_term, dz_MD,
        block.counts, block.row_indptr, block.edge_target, block.row_edges, table.relations,
        **constants, ROWS=rows_tile.items, EDGES=rows_tile.edges, num_warps=rows_tile.warps,
    )  # fmt: skip
    return dz_MD
