"""Blocks of the size that a sample of IGBH has, at which R-GAT's operations are measured; a batch is seeds.

Nodes and rows of a seed are those that mean degrees and fanouts of 15, 10 and 5 give a graph of an eighth of the nodes.
"""

from __future__ import annotations

import functools
import itertools

import torch

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.schema import Schema
from common.ops.bench import cases

HEADS, HEAD_SIZE = 4, 128
HIDDEN = HEADS * HEAD_SIZE
FEATURES = 1024

SCHEMA = Schema.augmented(
    ("paper", "author", "fos", "institute", "journal", "conference"),
    (
        "paper__cites__paper",
        "paper__written_by__author",
        "author__affiliated_to__institute",
        "paper__topic__fos",
        "paper__published__journal",
        "paper__venue__conference",
    ),
    "paper",
)

NODES = (
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (11.0, 2.7, 3.0, 0.0, 0.3, 0.2),
    (141.0, 29.0, 14.0, 0.5, 1.5, 0.25),
    (850.0, 370.0, 40.0, 1.6, 3.0, 0.28),
)
"""Of a seed, within so many hops, by type."""

ROWS = (
    (10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.7, 0.0, 3.0, 0.3, 0.2),
    (90.0, 6.0, 0.0, 38.0, 3.0, 2.0, 29.0, 0.5, 14.0, 1.5, 0.25),
    (690.0, 67.0, 2.5, 85.0, 13.0, 4.0, 355.0, 1.6, 40.0, 3.0, 0.28),
)
"""Of a seed, at each level, by relation."""

ROOM = 1.03
"""Of what is filled on average."""


def _scaled(table: tuple[tuple[float, ...], ...], factor: float) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(round(value * factor) for value in line) for line in table)


def rows(seeds: int) -> tuple[tuple[int, ...], ...]:
    """Rows that are filled, at each level and by relation."""
    return _scaled(ROWS, seeds)


def nodes(seeds: int) -> tuple[tuple[int, ...], ...]:
    """Nodes that are filled, within so many hops and by type."""
    return _scaled(NODES, seeds)


def targets(seeds: int, level: int) -> tuple[int, ...]:
    """Targets of each relation that are filled at a level."""
    return tuple(nodes(seeds)[level - 1][target] for target in SCHEMA.targets)


@functools.lru_cache(maxsize=4)
def shape(seeds: int) -> BlockShape:
    """Room of a block without edges."""
    node_rooms = _scaled(NODES, seeds * ROOM)
    row_rooms = _scaled(ROWS, seeds * ROOM)
    return BlockShape(SCHEMA, node_rooms, ((0,) * len(SCHEMA.relations),) * len(ROWS), row_rooms)


def block(seeds: int) -> Block:
    """A block with nodes and rows and without edges.

    What a hop finds by a relation has neighbouring numbers, as in a sample, and most nodes are found by one alone.
    """
    room = shape(seeds)
    made = Block.empty(room, torch.device(cases.DEVICE))
    for tensor in made.tensors().values():
        tensor.fill_(-1)
    made.node_counts.copy_(torch.tensor(nodes(seeds)))
    made.row_counts.copy_(torch.tensor(rows(seeds)))
    used: dict[tuple[int, int], int] = {}
    for relation, source in enumerate(SCHEMA.sources):
        first, into = room.row_offsets(room.hops)[relation], room.node_row_offsets[relation]
        row = 0
        for level, (before, after) in enumerate(itertools.pairwise(nodes(seeds)), 1):
            found = rows(seeds)[level - 1][relation] - row
            start = used.get((level, source), 0)
            used[level, source] = start + found
            news = max(after[source] - before[source], found)
            node = torch.arange(start, start + found, device=cases.DEVICE, dtype=torch.int32) % news
            node = (node + min(before[source], after[source] - news)).clamp_(min=0)
            made.rows[first + row : first + row + found] = node
            if level < room.hops:
                made.node_row[into + node.long()] = torch.arange(
                    row, row + found, device=cases.DEVICE, dtype=torch.int32
                )
            row += found
    return made
