"""Device tables for kernels: offsets of relations and types in the tensors of a level, and tiles of the capacities.

Every table is int32, and made once per shape, level and device, before a CUDA graph is captured, because it is copied
from the host. Tables stay cached forever, because captured graphs keep reading them; a run has a few shapes, whose
tables take less than a megabyte each. Tiles cover the capacities; kernels read from the device's counts how much of a
tile is filled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, device_table

_LEAST_COLUMNS = 16
"""Minimum columns of a product on tensor cores."""


class Tiles(NamedTuple):
    """Capacities cut into tiles.

    Attributes:
        table: [tiles, 2]: the part (a relation or type), and its first row or node.
        firsts: first tile of each part.
    """

    table: Tensor
    firsts: tuple[int, ...]
    of_part: tuple[int, ...]


def _tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return device_table(values, torch.int32, device)


@functools.cache
def tiles(capacities: tuple[int, ...], size: int, device: torch.device) -> Tiles:
    """Return tiles of ``size`` entries for parts with capacities ``capacities``; an empty part has no tile."""
    pieces = [[part, first] for part, capacity in enumerate(capacities) for first in range(0, capacity, size)]
    of_part = tuple(triton.cdiv(capacity, size) for capacity in capacities)
    firsts = tuple(sum(of_part[:part]) for part in range(len(capacities)))
    return Tiles(_tensor(pieces, device), firsts, of_part)


@functools.cache
def relations(shape: BlockShape, level: int, device: torch.device) -> Tensor:
    """Return [R, 5]: the fields that :mod:`benchmarks.rgat.ops.projection.kernels` names."""
    nodes = shape.node_offsets(level)
    lines = [
        [
            shape.row_offsets(shape.hops)[relation],
            shape.row_offsets(level)[relation],
            nodes[source],
            shape.node_row_offsets[relation],
            shape.target_offsets(level)[relation],
        ]
        for relation, source in enumerate(shape.schema.sources)
    ]
    return _tensor(lines, device)


@functools.cache
def node_offsets(shape: BlockShape, level: int, device: torch.device) -> Tensor:
    """Return [types]: offset of each type's nodes at a level."""
    return _tensor(shape.node_offsets(level)[:-1], device)


class IncomingColumns(NamedTuple):
    """Relations into each type, as columns of a product: one column per relation and head.

    Attributes:
        table: [types, columns]: relation of each column, -1 for unused columns.
        columns: number of columns, a power of two, the same for all types.
        firsts: [R]: column of each relation's first head.
    """

    table: Tensor
    columns: int
    firsts: tuple[int, ...]


@functools.cache
def into(shape: BlockShape, heads: int, device: torch.device) -> IncomingColumns:
    """Return the relations into each type; depends only on the schema and the number of heads."""
    schema = shape.schema
    of_type = [schema.into(node_type) for node_type in range(len(schema.types))]
    columns = max(_LEAST_COLUMNS, triton.next_power_of_2(heads * max(map(len, of_type))))
    lines = [[relation for relation in own for _ in range(heads)] for own in of_type]
    table = _tensor([line + [-1] * (columns - len(line)) for line in lines], device)
    firsts = tuple(heads * of_type[target].index(relation) for relation, target in enumerate(schema.targets))
    return IncomingColumns(table, columns, firsts)


class OutgoingRelations(NamedTuple):
    """Relations from each type that have capacity for rows at a level.

    Attributes:
        indptr: [types + 1]: first relation of each type.
        relations: relations, by source type.
    """

    indptr: Tensor
    relations: Tensor


@functools.cache
def from_types(shape: BlockShape, level: int, device: torch.device) -> OutgoingRelations:
    """Return the relations from each type at a level."""
    indptr, found = [0], []
    for node_type in range(len(shape.schema.types)):
        for relation, source in enumerate(shape.schema.sources):
            if source == node_type and shape.rows[level - 1][relation]:
                found.append(relation)
        indptr.append(len(found))
    return OutgoingRelations(_tensor(indptr, device), _tensor(found, device))


def target_capacities(shape: BlockShape, level: int) -> tuple[int, ...]:
    """Return the capacity of targets of each type at a level; 0 for types without incoming relations."""
    capacities = shape.nodes[level - 1]
    return tuple(capacity if shape.schema.into(node_type) else 0 for node_type, capacity in enumerate(capacities))


@functools.cache
def parts(lines: tuple[tuple[int, int, int, int], ...], device: torch.device) -> Tensor:
    """Return [R, 4]: index of a relation's count, its first split, number of splits, and first column."""
    return _tensor(lines, device)
