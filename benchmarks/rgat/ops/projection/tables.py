"""Where relations and types lie in the tensors of a level, and how the room is cut into tiles, for kernels to look up.

Every table is int32, made once for a shape, level and device, and before a CUDA graph is captured, as it is copied
from the host. None is ever forgotten, since captured graphs go on reading it: a run has a handful of shapes, whose
tables take less than a megabyte each. What is cut is the room; how much of a tile is filled the kernels ask the
device's counts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.device_tables import device_table

_LEAST_COLUMNS = 16
"""Of a product in matrix units."""


class Tiles(NamedTuple):
    """A room in pieces.

    Attributes:
        table: [tiles, 2]: the part, which is a relation or a type, and the first of its rows or nodes.
        firsts: first tile of each part.
        of_part: tiles of each part.
    """

    table: Tensor
    firsts: tuple[int, ...]
    of_part: tuple[int, ...]


def _tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return device_table(values, torch.int32, device)


@functools.cache
def tiles(rooms: tuple[int, ...], size: int, device: torch.device) -> Tiles:
    """Parts with room for so many, in pieces of ``size``; a part without room has none."""
    pieces = [[part, first] for part, room in enumerate(rooms) for first in range(0, room, size)]
    of_part = tuple(triton.cdiv(room, size) for room in rooms)
    firsts = tuple(sum(of_part[:part]) for part in range(len(rooms)))
    return Tiles(_tensor(pieces, device), firsts, of_part)


@functools.cache
def relations(shape: BlockShape, level: int, device: torch.device) -> Tensor:
    """[R, 5]: the fields that :mod:`benchmarks.rgat.ops.projection.kernels` numbers."""
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
    """[types]: where each type's nodes begin at a level."""
    return _tensor(shape.node_offsets(level)[:-1], device)


class Into(NamedTuple):
    """The relations into each type, as columns of a product: one for each head of each of them.

    Attributes:
        table: [types, columns]: the relation of each column, -1 for none.
        columns: the same number for all types, a power of two.
        firsts: [R]: column of each relation's first head.
    """

    table: Tensor
    columns: int
    firsts: tuple[int, ...]


@functools.cache
def into(shape: BlockShape, heads: int, device: torch.device) -> Into:
    """By the schema alone."""
    schema = shape.schema
    of_type = [schema.into(node_type) for node_type in range(len(schema.types))]
    columns = max(_LEAST_COLUMNS, triton.next_power_of_2(heads * max(map(len, of_type))))
    lines = [[relation for relation in own for _ in range(heads)] for own in of_type]
    table = _tensor([line + [-1] * (columns - len(line)) for line in lines], device)
    firsts = tuple(heads * of_type[target].index(relation) for relation, target in enumerate(schema.targets))
    return Into(table, columns, firsts)


class From(NamedTuple):
    """The relations from each type that have room for rows at a level.

    Attributes:
        indptr: [types + 1].
        relations: by type.
    """

    indptr: Tensor
    relations: Tensor


@functools.cache
def from_types(shape: BlockShape, level: int, device: torch.device) -> From:
    """Of a level."""
    indptr, found = [0], []
    for node_type in range(len(shape.schema.types)):
        for relation, source in enumerate(shape.schema.sources):
            if source == node_type and shape.rows[level - 1][relation]:
                found.append(relation)
        indptr.append(len(found))
    return From(_tensor(indptr, device), _tensor(found, device))


def target_rooms(shape: BlockShape, level: int) -> tuple[int, ...]:
    """Targets of each type that have room at a level; none of a type that no relation leads to."""
    rooms = shape.nodes[level - 1]
    return tuple(room if shape.schema.into(node_type) else 0 for node_type, room in enumerate(rooms))


@functools.cache
def parts(lines: tuple[tuple[int, int, int, int], ...], device: torch.device) -> Tensor:
    """[R, 4]: number of a relation's count, its first split, how many there are, and its first column."""
    return _tensor(lines, device)
