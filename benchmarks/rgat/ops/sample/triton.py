"""Sampling with the Triton kernels of :mod:`benchmarks.rgat.ops.sample.kernels`, prefix sums and one sort."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock, device_table, to_device
from benchmarks.rgat.ops.sample import kernels
from benchmarks.rgat.ops.sample.reference import SITES, UNSEEN, require_capacity
from common.ops.tile import Tile

TILES: dict[str, Tile] = {
    "targets": Tile(items=128, warps=4),
    "edges": Tile(items=512, warps=4),
    "nodes": Tile(items=512, warps=4),
}
"""Tile by kind of items. ``items``: items of one relation or type per program."""


class _Grid(NamedTuple):
    """Programs of kernels that process the same items of relations or types.

    Attributes:
        table: [2, programs], int32: relation or type, and first item, of each program.
        programs: number of programs, as a grid.
    """

    table: Tensor
    programs: tuple[int]
    tile: Tile


@functools.cache
def _grid(items: tuple[int, ...], tile: Tile, device: torch.device) -> _Grid:
    """Return programs for the given items of each relation or type, at least one each.

    Cached forever, because captured graphs keep reading the table.
    """
    each = [
        (number, first) for number, capacity in enumerate(items) for first in range(0, max(capacity, 1), tile.items)
    ]
    table = torch.tensor(each, dtype=torch.int32).t().contiguous()
    return _Grid(to_device(table, device), (len(each),), tile)


class TritonSampler:
    """Sampler on GPUs, with about 40 launches; see :class:`benchmarks.rgat.ops.sample.reference.NeighborSampler`."""

    def __init__(self, graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> None:
        require_capacity(graph, fanouts, shape)
        self._graph, self._fanouts, self._shape = graph, tuple(fanouts), shape
        schema, device, hops = graph.schema, graph.device, range(shape.hops)
        self._stamp_offsets = (0, *accumulate(graph.nodes))
        self._tables = device_table([self._fields(hop) for hop in hops], torch.int64, device)
        self._capacities = device_table(shape.nodes, torch.int32, device)
        self._per_shard = device_table(graph.targets_per_shard, torch.int32, device)
        self._types = device_table([shape.node_offsets(shape.hops)[:-1], self._stamp_offsets[:-1]], torch.int64, device)
        self._pointers = graph.pointers

        def entries(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        most, edges = shape.target_offsets(shape.hops)[-1], shape.edge_offsets[-1]
        self._stamps = graph.stamps
        self._row_stamps = entries(sum(shape.nodes[-1][source] for source in schema.sources))
        self._begin, self._degree = entries(most, torch.int64), entries(most)
        self._source, self._opening, self._key = entries(edges), entries(edges), entries(edges)
        self._items, self._sums = entries(max(most, edges)), entries(max(most, edges))

    def _fields(self, hop: int) -> list[list[int]]:
        """Return [FIELDS][R]; see :mod:`benchmarks.rgat.ops.sample.kernels`."""
        shape, schema = self._shape, self._shape.schema
        relations, nodes = range(len(schema.relations)), shape.node_offsets(shape.hops)
        row_stamps = (0, *accumulate(shape.nodes[-1][source] for source in schema.sources))
        by_field = {
            kernels.SOURCE: schema.sources,
            kernels.TARGET: schema.targets,
            kernels.STAMPS: [self._stamp_offsets[source] for source in schema.sources],
            kernels.SOURCE_NODES: [nodes[source] for source in schema.sources],
            kernels.TARGET_NODES: [nodes[target] for target in schema.targets],
            kernels.TARGETS: shape.target_offsets(hop + 1),
            kernels.TARGET_CAPACITY: [shape.nodes[hop][target] for target in schema.targets],
            kernels.EDGES: shape.edge_offsets,
            kernels.HOP_EDGES: (0, *accumulate(shape.edges[hop])),
            kernels.EDGE_CAPACITY: shape.edges[hop],
            kernels.SOURCE_CAPACITY: [shape.nodes[hop + 1][source] for source in schema.sources],
            kernels.ROW_CAPACITY: shape.rows[hop],
            kernels.INDPTR: shape.indptr_offsets,
            kernels.ROWS: shape.row_offsets(shape.hops),
            kernels.ROW_INDPTR: shape.row_indptr_offsets,
            kernels.NODE_ROW: shape.node_row_offsets,
            kernels.ROW_STAMPS: row_stamps,
        }
        columns = {field.value: values for field, values in by_field.items()}
        return [[columns[field][relation] for relation in relations] for field in range(kernels.FIELDS.value)]

    @torch.no_grad()
    def __call__(self, seeds: Tensor, count: Tensor | int, seed: Tensor) -> SampledBlock:
        block = SampledBlock.empty(self._shape, self._graph.device)
        self._start(block, seeds, count)
        for hop in range(self._shape.hops):
            self._draw(hop, block, seed)
            self._discover(hop, block)
        self._number_rows(block)
        self._clear(block)
        return block

    def _grid(self, items: Sequence[int], tile: str) -> _Grid:
        return _grid(tuple(items), TILES[tile], self._graph.device)

    @property
    def _sizes(self) -> dict[str, int]:
        return {"R": len(self._shape.schema.relations), "T": len(self._shape.schema.types), "H": self._shape.hops}

    def _start(self, block: SampledBlock, seeds: Tensor, count: Tensor | int) -> None:
        shape, schema = self._shape, self._shape.schema
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=torch.int32, device=seeds.device)
        tile = TILES["nodes"]
        first = shape.node_offsets(shape.hops)[schema.seed_type]
        kernels.sample_start_kernel[(max(1, triton.cdiv(shape.seeds, tile.items)),)](
            seeds, count, block.nodes[first:], self._stamps[self._stamp_offsets[schema.seed_type] :], block.counts,
            shape.seeds, schema.seed_type, shape.counts - 1, T=len(schema.types),
            T_LANES=triton.next_power_of_2(len(schema.types)), BLOCK=tile.items, num_warps=tile.warps,
        )  # fmt: skip

    def _draw(self, hop: int, block: SampledBlock, seed: Tensor) -> None:
        """Draw the hop's edges."""
        shape, table = self._shape, self._tables[hop]
        grid = self._grid([shape.nodes[hop][target] for target in shape.schema.targets], "targets")
        items = shape.target_offsets(hop + 1)[-1]
        take, sums = self._items[:items], self._sums[:items]
        sizes = self._sizes
        kernels.sample_degree_kernel[grid.programs](
            grid.table, table, block.counts, self._pointers, self._per_shard, block.nodes, self._begin, self._degree,
            take, self._graph.shards, HOP=hop, FANOUT=self._fanouts[hop], R=sizes["R"], T=sizes["T"],
            BLOCK=grid.tile.items, num_warps=grid.tile.warps,
        )  # fmt: skip
        torch.cumsum(take, 0, dtype=torch.int32, out=sums)
        kernels.sample_draw_kernel[grid.programs](
            grid.table, table, block.counts, self._pointers, self._per_shard, block.nodes, self._begin, self._degree,
            take, sums, seed, self._stamps, block.indptr, block.edge_target, self._source, self._graph.shards,
            shape.counts - 1, HOP=hop, FANOUT=self._fanouts[hop], **sizes, SITES=SITES,
            BLOCK=grid.tile.items, num_warps=grid.tile.warps,
        )  # fmt: skip

    def _discover(self, hop: int, block: SampledBlock) -> None:
        """Number the nodes that the hop's edges reached first."""
        shape, table = self._shape, self._tables[hop]
        grid = self._grid(shape.edges[hop], "edges")
        flag, sums = self._items[: sum(shape.edges[hop])], self._sums[: sum(shape.edges[hop])]
        sizes = self._sizes
        kernels.sample_flag_kernel[grid.programs](
            grid.table, table, block.counts, self._stamps, self._source, flag,
            HOP=hop, **sizes, BLOCK=grid.tile.items, num_warps=grid.tile.warps,
        )  # fmt: skip
        torch.cumsum(flag, 0, dtype=torch.int32, out=sums)
        kernels.sample_number_kernel[grid.programs](
            grid.table, table, block.counts, self._stamps, self._source, flag, sums, self._capacities[hop + 1],
            block.nodes,
            shape.counts - 1, HOP=hop, **sizes, R_LANES=triton.next_power_of_2(sizes["R"]),
            T_LANES=triton.next_power_of_2(sizes["T"]), BLOCK=grid.tile.items, num_warps=grid.tile.warps,
        )  # fmt: skip

    def _number_rows(self, block: SampledBlock) -> None:
        """Number the rows of all relations, and write ``row_edges`` and ``row_indptr``."""
        shape, last = self._shape, self._shape.counts - 1
        grid = self._grid(shape.edges[-1], "edges")
        inner = self._grid([shape.nodes[-2][source] for source in shape.schema.sources], "nodes")
        flag, sums = self._items[: shape.edge_offsets[-1]], self._sums[: shape.edge_offsets[-1]]
        how = {**self._sizes, "BLOCK": grid.tile.items, "num_warps": grid.tile.warps}
        self._row_stamps.fill_(UNSEEN)
        kernels.sample_source_kernel[grid.programs](
            grid.table, self._tables, block.counts, self._stamps, self._source, self._row_stamps, **how
        )
        kernels.sample_row_flag_kernel[grid.programs](
            grid.table, self._tables, block.counts, self._source, self._row_stamps, self._opening, flag, **how
        )
        torch.cumsum(flag, 0, dtype=torch.int32, out=sums)
        kernels.sample_row_kernel[grid.programs](
            grid.table, self._tables, block.counts, self._source, self._opening, sums, block.edge_row, block.rows,
            self._key, last, **how,
        )  # fmt: skip
        key, order = self._key.sort(stable=True)
        kernels.sample_transpose_kernel[grid.programs](
            grid.table, self._tables, block.counts, key, order, block.row_edges, block.row_indptr, **how
        )
        kernels.sample_node_row_kernel[inner.programs](
            inner.table, self._tables, block.counts, self._row_stamps, sums, block.node_row,
            **self._sizes, BLOCK=inner.tile.items, num_warps=inner.tile.warps,
        )  # fmt: skip

    def _clear(self, block: SampledBlock) -> None:
        """Reset the stamps of all nodes of the block; nodes beyond the capacity were reset in their hop."""
        grid = self._grid(self._shape.nodes[-1], "nodes")
        kernels.sample_clear_kernel[grid.programs](
            grid.table, self._types, block.counts, block.nodes, self._stamps, T=len(self._shape.schema.types),
            H=self._shape.hops, BLOCK=grid.tile.items, num_warps=grid.tile.warps,
        )  # fmt: skip


def triton_sampler(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> TritonSampler:
    """Return a sampler that only launches kernels, for GPUs.

    Raises:
        ValueError: see :func:`benchmarks.rgat.ops.sample.reference.require_capacity`.
    """
    return TritonSampler(graph, fanouts, shape)
