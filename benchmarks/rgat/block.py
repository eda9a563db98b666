"""What is sampled around the seeds of a micro-batch: nodes, and for every relation edges and the rows that they read.

Nodes of a type are numbered in the order in which they are found: the seeds, then what hop 1 adds, and so on. So the
nodes within k hops are the first of their type, the edges of hops 1 to k the first of their relation, and one block
serves all convolutions: the one whose inputs lie within k hops, at *level* k, reads prefixes of everything.

Edges of a relation are sorted by target, and targets expand once, each in the hop after the one that found it. A *row*
is a node that is the source of an edge of the relation; rows are numbered by the first edge that has them.

Shapes: H hops, T node types, R relations. All tensors have room for what :class:`BlockShape` says; how much of it is
filled is known on the device alone, and nothing beyond it may be read.
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
    """Room of a block: upper bounds.

    Attributes:
        schema: of the graph.
        nodes: [H + 1][T]: nodes within so many hops; those within 0 hops are the seeds.
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
        """H."""
        return len(self.edges)

    @property
    def seeds(self) -> int:
        """Seeds, all of the schema's type of seeds."""
        return self.nodes[0][self.schema.seed_type]

    @functools.cached_property
    def edge_offsets(self) -> tuple[int, ...]:
        """[R + 1]: where a relation's edges begin."""
        return _offsets(list(self.edges[-1]))

    @functools.cached_property
    def indptr_offsets(self) -> tuple[int, ...]:
        """[R + 1]: where a relation's ``indptr`` begins: one entry more than there are targets."""
        return _offsets([self.nodes[-2][target] + 1 for target in self.schema.targets])

    @functools.cached_property
    def row_indptr_offsets(self) -> tuple[int, ...]:
        """[R + 1]: where a relation's ``row_indptr`` begins: one entry more than there are rows."""
        return _offsets([rows + 1 for rows in self.rows[-1]])

    @functools.cached_property
    def node_row_offsets(self) -> tuple[int, ...]:
        """[R + 1]: where a relation's ``node_row`` begins: an entry for every node within H - 1 hops of its sources."""
        return _offsets([self.nodes[-2][source] for source in self.schema.sources])

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a run has a handful of shapes
    def node_offsets(self, hop: int) -> tuple[int, ...]:
        """[T + 1]: where a type begins in a tensor of all nodes within ``hop`` hops, 0 to H."""
        return _offsets(list(self.nodes[hop]))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a run has a handful of shapes
    def row_offsets(self, level: int) -> tuple[int, ...]:
        """[R + 1]: where a relation begins in a tensor of all rows at ``level``, 1 to H."""
        return _offsets(list(self.rows[level - 1]))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a run has a handful of shapes
    def target_offsets(self, level: int) -> tuple[int, ...]:
        """[R + 1]: where a relation begins in a tensor that has every relation's targets at ``level``, 1 to H."""
        return _offsets([self.nodes[level - 1][target] for target in self.schema.targets])

    @property
    def counts(self) -> int:
        """Numbers in ``Block.counts``."""
        types, relations = len(self.schema.types), len(self.schema.relations)
        return (self.hops + 1) * types + 2 * self.hops * relations + 1


@dataclass(frozen=True)
class Block:
    """A sampled block; all tensors int32, on one device.

    Attributes:
        shape: its room.
        counts: [shape.counts]: what is filled; see the properties.
        nodes: [shape.node_offsets(H)[-1]]: the graph's number of each node, by type.
        indptr: [shape.indptr_offsets[-1]]: for each relation and target, within H - 1 hops, the first of its edges,
            counted from the relation's first; after the last target that is filled, the end of the last one's.
        edge_row: [shape.edge_offsets[-1]]: row of each edge, counted in its relation.
        edge_target: [shape.edge_offsets[-1]]: target of each edge, counted in its type.
        rows: [shape.row_offsets(H)[-1]]: node of each row, counted in its type.
        node_row: [shape.node_row_offsets[-1]]: row of each node within H - 1 hops in a relation, or -1; a row of a
            later level than the reader's counts as none.
        row_indptr: [shape.row_indptr_offsets[-1]]: for each relation and row the first of its entries in
            ``row_edges``, counted from the relation's first; after the last row that is filled, the end of the last
            one's.
        row_edges: [shape.edge_offsets[-1]]: the edges of each row, counted in their relation, ascending.
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
        """A block whose tensors hold anything."""
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
        """The block that :meth:`tensors` gave the tensors of, perhaps among others."""
        return cls(shape, **{field.name: tensors[field.name] for field in fields(cls) if field.name != "shape"})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "shape"}

    @property
    def node_counts(self) -> Tensor:
        """[H + 1, T]: nodes within so many hops; a view of ``counts``."""
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
        """[1]: not 0 where the room was too small: the block lacks something. A view of ``counts``."""
        return self.counts[-1:]

    @property
    def _nodes(self) -> int:
        return (self.shape.hops + 1) * len(self.shape.schema.types)

    @property
    def _edges(self) -> int:
        return self.shape.hops * len(self.shape.schema.relations)
