"""How much room blocks need: never more than the fanouts allow, and what some batches have taken with a margin."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.graph import Graph


def largest_shape(graph: Graph, seeds: int, fanouts: Sequence[int]) -> BlockShape:
    """Room that no batch of ``seeds`` seeds can exceed, for ``fanouts`` from the seeds outward."""
    schema = graph.schema
    new = [seeds if number == schema.seed_type else 0 for number in range(len(schema.types))]
    nodes, edges, rows = [new], [[0] * len(schema.relations)], []
    for fanout in fanouts:
        drawn = [new[target] * fanout for target in schema.targets]
        new = [0] * len(schema.types)
        for source, count in zip(schema.sources, drawn, strict=True):
            new[source] += count
        new = [min(count, most) for count, most in zip(new, graph.nodes, strict=True)]
        nodes.append(
            [min(before + count, most) for before, count, most in zip(nodes[-1], new, graph.nodes, strict=True)]
        )
        edges.append(
            [min(before + count, most) for before, count, most in zip(edges[-1], drawn, graph.edges, strict=True)]
        )
        rows.append([min(count, nodes[-1][source]) for count, source in zip(edges[-1], schema.sources, strict=True)])
    return BlockShape(schema, *(tuple(map(tuple, table)) for table in (nodes, edges[1:], rows)))
