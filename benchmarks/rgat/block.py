"""Block sampled around the seeds of a micro-batch: nodes, and for every relation its edges and the rows they read.

Nodes of a type are numbered in the order of discovery: seeds, then the nodes that hop 1 adds, and so on. The nodes
within k hops are therefore a prefix of their type, and the edges of hops 1 to k a prefix of their relation. One block
serves all convolutions: the convolution at *level* k, whose inputs are within k hops, reads prefixes of every tensor.

Edges of a relation are sorted by target. Each target draws its edges once, in the hop after its discovery. A *row* is
a node that is the source of an edge of the relation; rows are numbered by their first edge.

Shapes: H hops, T node types, R relations. Tensors have the capacities of :class:`BlockShape`. Only the device knows
how many entries are filled; the rest must not be read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.rgat.schema import Schema


def _offsets(sizes: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


@dataclass(frozen=True, repr=False)
class BlockShape:
    """Capacities of a block (upper bounds of its counts).

    Attributes:
        nodes: [H + 1][T]: nodes within h hops; those within 0 hops are the seeds.
        edges: [H][R]: edges of hops 1 to h + 1.
        rows: [H][R]: rows of these edges.
    """

    schema: Schema
    nodes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        types, relations = len(self.schema.types), len(self.schema.relations)
        if not len(self.nodes) - 1 == len(self.edges) == len(self.rows) >= 1:
            raise ValueError(f"{len(self.nodes) - 1}, {len(self.edges)} and {len(self.rows)} hops")
        for name, table, width in (
            ("nodes", self.nodes, types),
            ("edges", self.edges, relations),
            ("rows", self.rows, relations),
        ):
            if any(len(line) != width for line in table):
                raise ValueError(f"{name}={table}: {width} numbers for each hop")
            if any(a > b for line, after in pairwise(table) for a, b in zip(line, after, strict=True)):
                raise ValueError(f"{name}={table}: later hops have room for less")

    def __repr__(self) -> str:
        seeds, nodes, edges = self.seeds, sum(self.nodes[-1]), sum(self.edges[-1])
        return f"BlockShape({seeds:,} seeds, {nodes:,} nodes, {edges:,} edges)"

    @property
    def hops(self) -> int:
        """H, the number of hops."""
        return len(self.edges)

    @property
    def seeds(self) -> int:
        """Capacity of seeds; all have the seed type of the schema."""
        return self.nodes[0][self.schema.seed_type]

    @functools.cached_property
    def edge_offsets(self) -> tuple[int, ...]:
        """[R + 1]: offset of each relation's edges."""
        return _offsets(list(self.edges[-1]))

    @functools.cached_property
    def indptr_offsets(self) -> tuple[int, ...]:
        """[R + 1]: offset of each relation's ``indptr``, which has one entry more than targets."""
        return _offsets([self.nodes[-2][target] + 1 for target in self.schema.targets])

    @functools.cached_property
    def row_indptr_offsets(self) -> tuple[int, ...]:
        """[R + 1]: offset of each relation's ``row_indptr``, which has one entry more than rows."""
        return _offsets([rows + 1 for rows in self.rows[-1]])

    @functools.cached_property
    def node_row_offsets(self) -> tuple[int, ...]:
        """[R + 1]: offset of each relation's ``node_row``: one entry per node of its source type within H - 1 hops."""
        return _offsets([self.nodes[-2][source] for source in self.schema.sources])

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a run has a handful of shapes
    def node_offsets(self, hop: int) -> tuple[int, ...]:
        """[T + 1]: offset of each type in a tensor of all nodes within ``hop`` hops, 0 to H."""
        return _offsets(list(self.nodes[hop]))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a run has a handful of shapes
    def row_offsets(self, level: int) -> tuple[int, ...]:
        """[R + 1]: offset of each relation in a tensor of all rows at ``level``, 1 to H."""
        return _offsets(list(self.rows[level - 1]))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a run has a handful of shapes
    def target_offsets(self, level: int) -> tuple[int, ...]:
        """[R + 1]: offset of each relation in a tensor of all relations' targets at ``level``, 1 to H."""
        return _offsets([self.nodes[level - 1][target] for target in self.schema.targets])

    @property
    def counts(self) -> int:
        """Length of ``Block.counts``."""
        types, relations = len(self.schema.types), len(self.schema.relations)
        return (self.hops + 1) * types + 2 * self.hops * relations + 1


@dataclass(frozen=True)
class Block:
    """A sampled block; all tensors are int32, on one device.

    Attributes:
        shape: capacities.
        counts: [shape.counts]: filled entries; the properties below are views of it.
        nodes: [shape.node_offsets(H)[-1]]: number of each node in the graph, by type.
        indptr: [shape.indptr_offsets[-1]]: for each relation and target within H - 1 hops, its first edge, relative
            to the relation. The entry after the last filled target is the end of that target's edges.
        edge_row: [shape.edge_offsets[-1]]: row of each edge, relative to its relation.
        edge_target: [shape.edge_offsets[-1]]: target of each edge, relative to its type.
        rows: [shape.row_offsets(H)[-1]]: node of each row, relative to its type.
        node_row: [shape.node_row_offsets[-1]]: for each relation, row of each source node within H - 1 hops, or -1. A
            reader at level k must ignore rows beyond its level.
        row_indptr: [shape.row_indptr_offsets[-1]]: for each relation and row, its first entry in ``row_edges``,
            relative to the relation. The entry after the last filled row is the end of that row's entries.
        row_edges: [shape.edge_offsets[-1]]: edges of each row, relative to their relation, ascending.
    """

    shape: BlockShape
    counts: Tensor
    nodes: Tensor
    indptr: Tensor
    edge_row: Tensor
    edge_target: Tensor
    rows: Tensor
    node_row: Tensor
    row_indptr: Tensor
    row_edges: Tensor

    @classmethod
    def empty(cls, shape: BlockShape, device: torch.device) -> Block:
        """Return a block with uninitialised tensors."""
        sizes = {
            "counts": shape.counts,
            "nodes": shape.node_offsets(shape.hops)[-1],
            "indptr": shape.indptr_offsets[-1],
            "edge_row": shape.edge_offsets[-1],
            "edge_target": shape.edge_offsets[-1],
            "rows": shape.row_offsets(shape.hops)[-1],
            "node_row": shape.node_row_offsets[-1],
            "row_indptr": shape.row_indptr_offsets[-1],
            "row_edges": shape.edge_offsets[-1],
        }
        return cls(shape, **{name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()})

    @classmethod
    def of(cls, shape: BlockShape, tensors: Mapping[str, Tensor]) -> Block:
        """Return the block with these tensors, as named by :meth:`tensors`; other names are ignored."""
        return cls(shape, **{field.name: tensors[field.name] for field in fields(cls) if field.name != "shape"})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "shape"}

    @property
    def node_counts(self) -> Tensor:
        """[H + 1, T]: nodes within h hops; a view of ``counts``."""
        return self.counts[: self._nodes].view(self.shape.hops + 1, -1)

    @property
    def edge_counts(self) -> Tensor:
        """[H, R]: edges of hops 1 to h + 1; a view of ``counts``."""
        return self.counts[self._nodes : self._nodes + self._edges].view(self.shape.hops, -1)

    @property
    def row_counts(self) -> Tensor:
        """[H, R]: rows of these edges; a view of ``counts``."""
        return self.counts[self._nodes + self._edges : -1].view(self.shape.hops, -1)

    @property
    def overflow(self) -> Tensor:
        """[1]: nonzero if a capacity was too small, so that the block is incomplete; a view of ``counts``."""
        return self.counts[-1:]

    @property
    def _nodes(self) -> int:
        return (self.shape.hops + 1) * len(self.shape.schema.types)

    @property
    def _edges(self) -> int:
        return self.shape.hops * len(self.shape.schema.relations)
