"""A graph in memory, its node types and relations, and the blocks that are sampled from it.

Graph: for every relation, the sources of each target's edges (CSC), in shards. A shard is a range of targets. Its
tensors may be in the memory of this GPU, in mapped memory of another GPU of the node, or in pinned host memory.
Kernels read all of them in place.

Sampled block: nodes around the seeds of a micro-batch, and for every relation its edges and the rows they read. Nodes
of a type are numbered in the order of discovery: seeds, then the nodes that hop 1 adds, and so on. The nodes within k
hops are therefore a prefix of their type, and the edges of hops 1 to k a prefix of their relation. One block serves
all convolutions: the convolution at *level* k, whose inputs are within k hops, reads prefixes of every tensor.

Edges of a relation are sorted by target. Each target draws its edges once, in the hop after its discovery. A *row* is
a node that is the source of an edge of the relation; rows are numbered by their first edge.

Shapes: H hops, T node types, R relations, S shards. Tensors of a block have the capacities of :class:`BlockShape`.
Only the device knows how many entries are filled; the rest must not be read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

SEPARATOR = "__"
REVERSED = "rev_"
LARGEST = (1 << 31) - 1
"""Maximum number of nodes of a type, because they are numbered in int32."""


@dataclass(frozen=True)
class Relation:
    """Edges of one kind, from ``source`` to ``target``."""

    source: str
    name: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Relation:
        """Return the relation of a folder name such as ``paper__cites__paper``.

        Raises:
            ValueError: the name does not have three parts.
        """
        parts = text.split(SEPARATOR)
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{text!r} is no relation: source__name__target")
        return cls(*parts)

    def __str__(self) -> str:
        return SEPARATOR.join((self.source, self.name, self.target))

    @property
    def symmetric(self) -> bool:
        """Whether source and target have one type. The reversed edges then belong to the relation itself."""
        return self.source == self.target

    @property
    def reverse(self) -> Relation:
        """Relation of the reversed edges, with separate weights; for a reversed relation, the stored one."""
        name = self.name.removeprefix(REVERSED) if self.name.startswith(REVERSED) else REVERSED + self.name
        return Relation(self.target, name, self.source)


@dataclass(frozen=True)
class Schema:
    """Node types and relations that a network sees, both in a fixed order.

    Attributes:
        types: names of the node types.
        seeds: node type that is classified.
    """

    types: tuple[str, ...]
    relations: tuple[Relation, ...]
    seeds: str

    @classmethod
    def augmented(cls, types: Sequence[str], stored: Sequence[str], seeds: str) -> Schema:
        """Return the schema for ``stored`` relations: each relation between two types also gets its reverse.

        Raises:
            ValueError: a relation has no valid name, or joins unknown types.
        """
        forward = [Relation.parse(text) for text in stored]
        backward = [relation.reverse for relation in forward if not relation.symmetric]
        return cls(tuple(types), (*forward, *backward), seeds)

    def __post_init__(self) -> None:
        if self.seeds not in self.types:
            raise ValueError(f"nodes of type {self.seeds!r} are classified, and the types are {', '.join(self.types)}")
        for relation in self.relations:
            for end in (relation.source, relation.target):
                if end not in self.types:
                    raise ValueError(f"{relation} joins {end!r}, and the types are {', '.join(self.types)}")
        for what, names in (("types", self.types), ("relations", self.relations)):
            if len(set(names)) < len(names):
                raise ValueError(f"two {what} are the same: {', '.join(str(name) for name in names)}")

    @functools.cached_property
    def seed_type(self) -> int:
        """Index of the seeds' type."""
        return self.types.index(self.seeds)

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """Index of each relation's source type."""
        return tuple(self.types.index(relation.source) for relation in self.relations)

    @functools.cached_property
    def targets(self) -> tuple[int, ...]:
        """Index of each relation's target type."""
        return tuple(self.types.index(relation.target) for relation in self.relations)

    def into(self, node_type: int) -> tuple[int, ...]:
        """Return the indices of the relations into a node type."""
        return tuple(number for number, target in enumerate(self.targets) if target == node_type)


@dataclass(frozen=True)
class Graph:
    """All relations of a graph. R relations, S shards.

    Attributes:
        nodes: number of nodes of each type.
        indptr: [R][S], int64, [targets_per_shard[r] + 1]: first edge of each target in the shard's ``indices``.
            Targets beyond the last node of the type have no edges.
        indices: [R][S], int32: sources of the edges.
        memory: memory of the shards, which must live as long as the graph; None if the tensors keep it alive.
    """

    schema: Schema
    nodes: tuple[int, ...]
    indptr: tuple[tuple[Tensor, ...], ...]
    indices: tuple[tuple[Tensor, ...], ...]
    device: torch.device
    memory: object = None

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.schema.types) or not all(0 < count <= LARGEST for count in self.nodes):
            raise ValueError(f"nodes={self.nodes}: a number for each of {', '.join(self.schema.types)}, 1 to 2^31 - 1")

    @property
    def shards(self) -> int:
        """S, the number of shards."""
        return len(self.indptr[0])

    @functools.cached_property
    def targets_per_shard(self) -> tuple[int, ...]:
        """Targets per shard, by relation: target i is in shard i // targets_per_shard[r]."""
        return tuple(len(shards[0]) - 1 for shards in self.indptr)

    @functools.cached_property
    def edges(self) -> tuple[int, ...]:
        """Number of edges of each relation."""
        return tuple(sum(len(shard) for shard in shards) for shards in self.indices)

    @functools.cached_property
    def stamps(self) -> Tensor:
        """[all nodes], int32, on ``device``: scratch in which samplers mark nodes, one block at a time; all unseen."""
        return torch.full((sum(self.nodes),), LARGEST, dtype=torch.int32, device=self.device)

    @functools.cached_property
    def pointers(self) -> Tensor:
        """[2, R, S], int64, on ``device``: addresses of all ``indptr``, then of all ``indices``, for kernels."""
        tables = [[[shard.data_ptr() for shard in shards] for shards in which] for which in (self.indptr, self.indices)]
        return device_table(tables, torch.int64, self.device)


def _offsets(sizes: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


@dataclass(frozen=True, repr=False)
class BlockShape:
    """Capacities of a block: upper bounds of its counts, which never decrease from hop to hop.

    Attributes:
        nodes: [H + 1][T]: nodes within h hops; those within 0 hops are the seeds.
        edges: [H][R]: edges of hops 1 to h + 1.
        rows: [H][R]: rows of these edges.
    """

    schema: Schema
    nodes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]

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
        """Length of ``SampledBlock.counts``."""
        types, relations = len(self.schema.types), len(self.schema.relations)
        return (self.hops + 1) * types + 2 * self.hops * relations + 1


@dataclass(frozen=True)
class SampledBlock:
    """A sampled block; all tensors are int32, on one device.

    Attributes:
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
    def empty(cls, shape: BlockShape, device: torch.device) -> SampledBlock:
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
    def of(cls, shape: BlockShape, tensors: Mapping[str, Tensor]) -> SampledBlock:
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


def device_table(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (nested) sequences of numbers as a tensor on ``device``; see :func:`to_device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on ``device``. A GPU copies it from pinned memory on its current stream.

    Other streams must wait for this stream before they read the result.

    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would copy from freed memory.
    """
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table of host numbers has to be copied before a CUDA graph is captured")
    return host.pin_memory().to(device, non_blocking=True)
