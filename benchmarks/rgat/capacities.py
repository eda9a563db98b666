"""Capacities of blocks: upper bounds from the fanouts, and estimates with a margin from some sampled batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.graph import Graph


def largest_shape(graph: Graph, seeds: int, fanouts: Sequence[int]) -> BlockShape:
    """Return capacities that no batch of ``seeds`` seeds can exceed; ``fanouts`` go from the seeds outward."""
    schema = graph.schema
    new = [seeds if number == schema.seed_type else 0 for number in range(len(schema.types))]
    limits = [max(count, first) for count, first in zip(graph.nodes, new, strict=True)]  # more seeds than nodes
    nodes, edges, rows = [new], [[0] * len(schema.relations)], []
    for fanout in fanouts:
        drawn = [new[target] * fanout for target in schema.targets]
        edges.append(_added(edges[-1], drawn, graph.edges))
        new = [0] * len(schema.types)
        for source, count in zip(schema.sources, drawn, strict=True):
            new[source] += count
        new = [min(count, most) for count, most in zip(new, limits, strict=True)]
        nodes.append(_added(nodes[-1], new, limits))
        rows.append([min(count, nodes[-1][source]) for count, source in zip(edges[-1], schema.sources, strict=True)])
    return BlockShape(schema, _table(nodes), _table(edges[1:]), _table(rows))


def _added(before: Sequence[int], new: Sequence[int], most: Sequence[int]) -> list[int]:
    return [min(old + more, limit) for old, more, limit in zip(before, new, most, strict=True)]


def moments(counts: Sequence[Sequence[int]]) -> Tensor:
    """Return the sums over sampled batches that :func:`enough_shape` needs. Ranks may add their results.

    Args:
        counts: ``Block.counts`` of each batch, C numbers each.

    Returns:
        (2 * C + 1,), int64, on the CPU: sums, sums of squares, number of batches.
    """
    each = torch.tensor(counts, dtype=torch.int64)
    return torch.cat([each.sum(0), (each * each).sum(0), torch.tensor([len(each)])])


def enough_shape(moments: Tensor, largest: BlockShape, sigma: float) -> BlockShape:
    """Return capacities of mean + ``sigma`` * standard deviation of every count, at most those of ``largest``.

    Every relation and type that can occur gets a capacity of at least 1. NVIDIA's sigma is 5, with 20 batches on each
    rank (training_results_v5.0, rgat).

    Args:
        moments: sum of :func:`moments` over all batches, (2 * C + 1,).
        largest: see :func:`largest_shape`; its number of seeds is kept.
        sigma: factor of the population standard deviation (divided by n, not n - 1).

    Raises:
        ValueError: there is no batch, the blocks have another shape, or a block is incomplete.
    """
    sums, squares, (batches,) = (part.tolist() for part in moments.split([largest.counts, largest.counts, 1]))
    if batches < 1:
        raise ValueError("no batch was sampled")
    if sums[-1]:
        raise ValueError("a sampled batch had too little room: what it would have taken is not known")
    wanted = [
        math.ceil((total + sigma * math.sqrt(batches * square - total * total)) / batches)
        for total, square in zip(sums, squares, strict=True)
    ]
    types, relations, hops = len(largest.schema.types), len(largest.schema.relations), largest.hops
    lines = iter(wanted)
    nodes = [[next(lines) for _ in range(types)] for _ in range(hops + 1)]
    edges, rows = ([[next(lines) for _ in range(relations)] for _ in range(hops)] for _ in range(2))
    nodes = [list(largest.nodes[0]), *_grown(nodes[1:], largest.nodes[1:], largest.nodes[0])]
    edges = _grown(edges, largest.edges, [0] * relations)
    rows = _grown(rows, largest.rows, [0] * relations)
    for hop, line in enumerate(rows):
        for relation, source in enumerate(largest.schema.sources):
            line[relation] = min(line[relation], edges[hop][relation], nodes[hop + 1][source])
    return BlockShape(largest.schema, _table(nodes), _table(edges), _table(rows))


def at_most(shape: BlockShape, limit: int) -> BlockShape:
    """Return ``shape`` with every capacity except the seeds limited to ``limit``."""
    return _each(shape, lambda room, largest: min(room, limit), shape)


def grown(shape: BlockShape, largest: BlockShape, least: int = 1) -> BlockShape:
    """Return ``shape`` with doubled capacities, at least ``least`` and at most those of ``largest``."""
    return _each(shape, lambda room, limit: min(max(2 * room, least), limit), largest)


def _each(shape: BlockShape, change: Callable[[int, int], int], largest: BlockShape) -> BlockShape:
    tables = []
    for table, limits in (
        (shape.nodes[1:], largest.nodes[1:]),
        (shape.edges, largest.edges),
        (shape.rows, largest.rows),
    ):
        changed = [[change(*pair) for pair in zip(*lines, strict=True)] for lines in zip(table, limits, strict=True)]
        tables.append(changed)
    nodes = [list(shape.nodes[0]), *_grown(tables[0], largest.nodes[1:], shape.nodes[0])]
    return BlockShape(shape.schema, _table(nodes), _table(tables[1]), _table(tables[2]))


def _grown(wanted: Sequence[Sequence[int]], largest: Sequence[Sequence[int]], least: Sequence[int]) -> list[list[int]]:
    """Return the capacities of each hop, not less than those of the hop before."""
    table: list[list[int]] = []
    for line, limits in zip(wanted, largest, strict=True):
        before = table[-1] if table else least
        table.append([min(limit, max(want, old, 1)) for want, old, limit in zip(line, before, limits, strict=True)])
    return table


def _table(lines: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(line) for line in lines)
