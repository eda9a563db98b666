"""Device tables that map the programs of a launch to parts of a block.

Each node type or relation has a range of programs. Types with most relations into them come first, so that the
longest programs do not run at the end of a launch.

Tables stay cached forever, because captured graphs keep reading them; a run has only a few shapes.
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
    """Programs of a launch over node types, or over the relations into them.

    Attributes:
        kinds: [types, 7]: first program; first output node; index of the node count in ``Block.counts``; capacity of
            nodes; first record in ``relations``; number of records; index of the type.
        relations: [R, 5]: index of the relation; its offset in ``indptr``, in edges, in the rows of the level and in
            the targets of the level.
        partials: [R, 3]: first program of a relation, distance to its next one, number of its programs; for summing
            their partial results.
        programs: number of programs.
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
            in ``Block.counts``. Relations with the most edges per row come first.
        programs: number of programs.
        chunks: chunks of all relations.
    """

    relations: Tensor
    programs: int
    chunks: int


def edge_counts_place(shape: BlockShape, level: int) -> int:
    """Return the offset of the relations' edge counts at ``level`` in ``Block.counts``."""
    return (shape.hops + 1) * len(shape.schema.types) + (level - 1) * len(shape.schema.relations)


def _on(device: torch.device, records: Sequence[Sequence[int]]) -> Tensor:
    return device_table(records, torch.int32, device)


@functools.cache
def by_kind(shape: BlockShape, level: int, device: torch.device, nodes: int, each_relation: bool) -> ByKind:
    """Return programs with ``nodes`` consecutive nodes of a type each.

    Args:
        level: level of the rows.
        device: device of the tables.
        nodes: nodes per program.
        each_relation: whether every relation into a type has separate programs; those with the same nodes are
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
    """Return programs with ``rows`` rows of a relation at ``level`` each, or with ``group`` chunks of ``row_edges``.

    Args:
        level: level of the rows.
        device: device of the tables.
        chunk: entries per chunk.
        rows, group: rows or chunks per program; exactly one of them is given.
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
