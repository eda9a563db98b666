"""Which part of a block each program of a launch has: tables of the host's numbers, on the device.

Programs are dealt to node types, or to relations, in runs; the types with most relations into them come first, so that
the longest programs do not end a launch.

No table is ever forgotten, since captured graphs go on reading it: a run has a handful of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.device_tables import device_table


class ByKind(NamedTuple):
    """A launch over node types, or over the relations into them.

    Attributes:
        kinds: [types, 7]: first program; first output node; place of the count of nodes in ``Block.counts``; nodes
            that there is room for; first record in ``relations``, and how many; number of the type.
        relations: [R, 5]: number; where it begins in ``indptr``, among edges, among the rows of the level and among
            the targets of the level.
        partials: [R, 3]: the first of the programs that share a relation, their distance, how many; for sums of what
            programs leave.
        programs: of the launch.
    """

    kinds: Tensor
    relations: Tensor
    partials: Tensor
    programs: int


class ByRelation(NamedTuple):
    """A launch over rows, or over chunks of ``row_edges``.

    Attributes:
        relations: [R, 9]: first program; number; where it begins among edges, in ``row_indptr``, among the rows of the
            level and among chunks; its target type's first output node; places of the counts of its rows and of its
            edges in ``Block.counts``. Those with the longest lists of edges come first.
        programs: of the launch.
        chunks: of all relations.
    """

    relations: Tensor
    programs: int
    chunks: int


def edge_counts_place(shape: BlockShape, level: int) -> int:
    """Where the counts of the relations' edges at ``level`` begin in ``Block.counts``."""
    return (shape.hops + 1) * len(shape.schema.types) + (level - 1) * len(shape.schema.relations)


def _on(device: torch.device, records: Sequence[Sequence[int]]) -> Tensor:
    return device_table(records, torch.int32, device)


@functools.cache
def by_kind(shape: BlockShape, level: int, device: torch.device, nodes: int, each_relation: bool) -> ByKind:
    """Programs that have ``nodes`` consecutive nodes of a type.

    Args:
        shape: of the block.
        level: of the rows.
        device: where the tables are wanted.
        nodes: of a program.
        each_relation: whether every relation into a type has programs of its own; those with the same nodes are then
            neighbours.
    """
    schema, rooms = shape.schema, shape.nodes[level - 1]
    order = sorted(range(len(rooms)), key=lambda kind: -len(schema.into(kind)))
    kinds: list[list[int]] = []
    relations: list[list[int]] = []
    partials = [[0, 1, 0] for _ in schema.relations]
    programs = 0
    for kind in order:
        into = schema.into(kind)
        node_count = (level - 1) * len(rooms) + kind
        first_node = shape.node_offsets(level - 1)[kind]
        kinds.append([programs, first_node, node_count, rooms[kind], len(relations), len(into), kind])
        ranges, lanes = -(-rooms[kind] // nodes), len(into) if each_relation else 1
        for lane, relation in enumerate(into):
            partials[relation] = [programs + (lane if each_relation else 0), lanes, ranges]
            offsets = (shape.indptr_offsets, shape.edge_offsets, shape.row_offsets(level), shape.target_offsets(level))
            relations.append([relation, *(table[relation] for table in offsets)])
        programs += ranges * lanes
    return ByKind(_on(device, kinds), _on(device, relations), _on(device, partials), programs)


@functools.cache
def by_relation(
    shape: BlockShape, level: int, device: torch.device, chunk: int, *, rows: int = 0, group: int = 0
) -> ByRelation:
    """Programs that have ``rows`` consecutive rows of a relation at ``level``, or ``group`` chunks of ``row_edges``.

    Args:
        shape: of the block.
        level: of the rows.
        device: where the tables are wanted.
        chunk: entries of a chunk.
        rows, group: of a program; one of them.
    """
    schema, edges = shape.schema, shape.edges[-1]
    edge_counts = edge_counts_place(shape, level)
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
