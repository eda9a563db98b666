"""Random blocks for tests, made edge by edge in Python from what their docstring says, and inputs around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock, Schema

GARBAGE = 1 << 30
"""Number beyond what is filled."""

SCHEMA = Schema.augmented(
    ("paper", "author", "topic"), ("paper__cites__paper", "paper__by__author", "paper__on__topic"), "paper"
)
"""Five relations, three of them into papers."""


@dataclass
class _Relation:
    rows: dict[int, int]
    row: list[int]
    target: list[int]
    first: list[int]


def random_block(
    seed: int = 0,
    *,
    schema: Schema = SCHEMA,
    graph: int = 30,
    seeds: int = 4,
    fanouts: tuple[int, ...] = (3, 2, 3),
    without: tuple[int, ...] = (),
    slack: int = 3,
    hub: float = 0.0,
    shape: BlockShape | None = None,
) -> SampledBlock:
    """A block of random edges in a graph of ``graph`` nodes of each type.

    Every target draws up to a hop's fanout of sources, often none, and the same one again at times.

    Args:
        without: relations without an edge.
        slack: room beyond what is filled.
        hub: share of the edges that come from node 0, beside its own.
        shape: room, in place of ``slack``.
    """
    random = torch.Generator().manual_seed(seed)
    nodes: list[dict[int, int]] = [{} for _ in schema.types]  # in the graph to in the block
    for node in torch.randperm(graph, generator=random)[:seeds].tolist():
        nodes[schema.seed_type][node] = len(nodes[schema.seed_type])
    relations = [_Relation({}, [], [], [0]) for _ in schema.relations]
    node_counts, edge_counts, row_counts = [[len(found) for found in nodes]], [], []
    expanded = [0 for _ in schema.types]
    for fanout in fanouts:
        frontier = [list(found.values())[done:] for found, done in zip(nodes, expanded, strict=True)]
        expanded = [len(found) for found in nodes]
        for number, relation in enumerate(relations):
            found = nodes[schema.sources[number]]
            for target in frontier[schema.targets[number]]:
                degree = (
                    0 if number in without else int(torch.randint(-1, fanout + 1, (), generator=random).clamp(min=0))
                )
                sources = torch.randint(graph, (degree,), generator=random)
                sources *= torch.rand(degree, generator=random) >= hub
                for source in sources.tolist():
                    node = found.setdefault(source, len(found))
                    relation.row.append(relation.rows.setdefault(node, len(relation.rows)))
                    relation.target.append(target)
                relation.first.append(len(relation.row))
        node_counts.append([len(found) for found in nodes])
        edge_counts.append([len(relation.row) for relation in relations])
        row_counts.append([len(relation.rows) for relation in relations])

    def room(counts: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(count + slack for count in line) for line in counts)

    if shape is None:
        rooms = room(node_counts)
        shape = BlockShape(schema, (tuple(node_counts[0]), *rooms[1:]), room(edge_counts), room(row_counts))
    block = SampledBlock.empty(shape, torch.device("cpu"))
    for tensor in block.tensors().values():
        tensor.fill_(GARBAGE)
    flat = [count for table in (node_counts, edge_counts, row_counts) for line in table for count in line]
    block.counts.copy_(torch.tensor([*flat, 0]))
    for kind, found in enumerate(nodes):
        _write(block.nodes, shape.node_offsets(shape.hops)[kind], list(found))
    for number, relation in enumerate(relations):
        _write(block.edge_row, shape.edge_offsets[number], relation.row)
        _write(block.edge_target, shape.edge_offsets[number], relation.target)
        ends = shape.indptr_offsets[number : number + 2]
        block.indptr[slice(*ends)] = len(relation.row)
        _write(block.indptr, ends[0], relation.first)
        _write(block.rows, shape.row_offsets(shape.hops)[number], list(relation.rows))
        ends = shape.node_row_offsets[number : number + 2]
        _write(
            block.node_row,
            ends[0],
            [relation.rows.get(node, -1) for node in range(node_counts[-2][schema.sources[number]])],
        )
        ends = shape.row_indptr_offsets[number : number + 2]
        block.row_indptr[slice(*ends)] = len(relation.row)
        edges_of: list[list[int]] = [[] for _ in relation.rows]
        for edge, row in enumerate(relation.row):
            edges_of[row].append(edge)
        _write(block.row_indptr, ends[0], [0, *torch.tensor([len(own) for own in edges_of]).cumsum(0).tolist()])
        _write(block.row_edges, shape.edge_offsets[number], [edge for own in edges_of for edge in own])
    return block


def _write(tensor: Tensor, first: int, values: list[int]) -> None:
    tensor[first : first + len(values)] = torch.tensor(values, dtype=torch.int32)


@dataclass
class Inputs:
    """Tensors of one convolution; NaN wherever a block fills nothing."""

    z_MD: Tensor
    source_term_MA: Tensor
    target_term_TA: Tensor
    bias_RD: Tensor
    att_source_RAd: Tensor
    dout_PD: Tensor


class Filled(NamedTuple):
    """Which entries of the tensors of a level exist, bool."""

    nodes: Tensor
    outputs: Tensor
    rows: Tensor
    targets: Tensor


def filled(block: SampledBlock, level: int) -> Filled:
    """Masks over the room of nodes within ``level`` and within ``level - 1`` hops, of rows and of targets."""
    shape, targets = block.shape, list(block.shape.schema.targets)
    inner, counts = shape.nodes[level - 1], block.node_counts[level - 1]

    def mask(rooms: Iterable[int], counts: Tensor) -> Tensor:
        exists = [torch.arange(room, device=counts.device) < count for room, count in zip(rooms, counts, strict=True)]
        return torch.cat(exists)

    return Filled(
        mask(shape.nodes[level], block.node_counts[level]),
        mask(inner, counts),
        mask(shape.rows[level - 1], block.row_counts[level - 1]),
        mask([inner[target] for target in targets], counts[targets]),
    )


def random_inputs(
    block: SampledBlock, level: int, heads: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    """Inputs for a block on the CPU. Terms belong to z and the vectors of attention."""
    random = torch.Generator().manual_seed(seed)
    shape = block.shape
    relations = len(shape.schema.relations)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    z_MD, dout_PD = (
        normal(shape.row_offsets(level)[-1], heads * width),
        normal(shape.node_offsets(level - 1)[-1], heads * width),
    )
    att_source_RAd, target_term_TA = normal(relations, heads, width), normal(shape.target_offsets(level)[-1], heads)
    z_MD = z_MD.to(dtype).double()
    att_of_row = att_source_RAd.repeat_interleave(torch.tensor(shape.rows[level - 1]), 0)
    source_term_MA = (z_MD.unflatten(1, (heads, width)) * att_of_row).sum(2)
    there = filled(block, level)
    for tensor, exists in (
        (z_MD, there.rows),
        (source_term_MA, there.rows),
        (target_term_TA, there.targets),
        (dout_PD, there.outputs),
    ):
        tensor[~exists] = torch.nan
    terms = torch.promote_types(dtype, torch.float32)
    return Inputs(
        z_MD.to(dtype), source_term_MA.to(terms), target_term_TA.to(terms), normal(relations, heads * width).to(terms),
        att_source_RAd.to(terms), dout_PD.to(dtype),
    )  # fmt: skip
