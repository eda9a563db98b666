"""Rooms that are too small for a block in one place."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rgat.graph import BlockShape, SampledBlock

SMALL_ROOMS = [
    ("nodes", 1, "paper"),
    ("nodes", 2, "author"),
    ("nodes", 3, "paper"),
    ("edges", 0, "paper__cites__paper"),
    ("edges", 1, "author__rev_by__paper"),
    ("edges", 2, "paper__by__author"),
    ("rows", 0, "paper__cites__paper"),
    ("rows", 2, "paper__cites__paper"),
]
"""Table of :class:`BlockShape`, line of it, and the type or relation that has little room there."""


def smaller(block: SampledBlock, shape: BlockShape, table: str, hop: int, name: str) -> BlockShape:
    """``shape`` where the named type or relation has room for two less than ``block`` has there."""
    counts = {"nodes": block.node_counts, "edges": block.edge_counts, "rows": block.row_counts}[table].tolist()
    names = shape.schema.types if table == "nodes" else [str(relation) for relation in shape.schema.relations]
    place = list(names).index(name)
    lines = [list(line) for line in getattr(shape, table)]
    for before in range(hop + 1):
        lines[before][place] = min(lines[before][place], counts[hop][place] - 2)
    return replace(shape, **{table: tuple(map(tuple, lines))})
