"""Sampling of single edges in lists and dictionaries, small graphs, filled parts of blocks, small capacities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock, Schema
from benchmarks.rgat.synthetic import synthetic_graph

SCHEMA = Schema.augmented(
    ("field", "paper", "author"), ("paper__cites__paper", "paper__by__author", "paper__of__field"), "paper"
)
NODES = (3, 60, 30)
DEGREES = {
    "paper__cites__paper": 4.0,
    "paper__by__author": 3.0,
    "author__rev_by__paper": 2.0,
    "field__rev_of__paper": 0.5,
}
"""By relation; that into fields has no edge. Some papers have none of a field, some cite themselves, or one twice."""


def small_graph(seed: int = 0, skew: float = 0.6) -> Graph:
    """With duplicate edges, self-loops, isolated targets and a relation without edges."""
    return synthetic_graph(SCHEMA, NODES, DEGREES, seed, torch.device("cpu"), skew)


def graph_of(schema: Schema, nodes: tuple[int, ...], adjacent: dict[str, list[list[int]]]) -> Graph:
    """The graph of the sources of each target, by relation; none for relations that are left out."""
    indptr, indices = [], []
    for relation, target in zip(schema.relations, schema.targets, strict=True):
        lists = adjacent.get(str(relation), [[]] * nodes[target])
        starts = torch.tensor([0, *map(len, lists)]).cumsum(0)
        indptr.append((starts,))
        indices.append((torch.tensor([source for each in lists for source in each], dtype=torch.int32),))
    return Graph(schema, nodes, tuple(indptr), tuple(indices), torch.device("cpu"))


def sharded(graph: Graph, shards: int) -> Graph:
    """The same graph in several shards."""
    indptr, indices = [], []
    for (starts,), (sources,) in zip(graph.indptr, graph.indices, strict=True):
        size = -(-(len(starts) - 1) // shards)
        firsts, pieces = [], []
        for shard in range(shards):
            place = torch.arange(shard * size, (shard + 1) * size + 1).clamp(max=len(starts) - 1)
            firsts.append(starts[place] - starts[place[0]])
            pieces.append(sources[starts[place[0]] : starts[place[-1]]].clone())
        indptr.append(tuple(firsts))
        indices.append(tuple(pieces))
    return Graph(graph.schema, graph.nodes, tuple(indptr), tuple(indices), graph.device)


def on(device: str, graph: Graph) -> Graph:
    """The same graph on another device."""
    indptr, indices = (
        tuple(tuple(shard.to(device) for shard in shards) for shards in which)
        for which in (graph.indptr, graph.indices)
    )
    return Graph(graph.schema, graph.nodes, indptr, indices, torch.device(device))


def neighbours(graph: Graph, relation: int, target: int) -> list[int]:
    """Sources of all edges into a target of a graph of one shard."""
    starts, sources = graph.indptr[relation][0], graph.indices[relation][0]
    return sources[int(starts[target]) : int(starts[target + 1])].tolist()


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def word(index: int, seed: int, site: int) -> int:
    """The 32 random bits of a place; see :mod:`common.ops.random_bits`."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    first = _mix(low ^ _mix((site * 0x9E3779B9 + 1) & 0xFFFFFFFF))
    second = _mix((high + _mix(first ^ site)) & 0xFFFFFFFF)
    return _mix(_mix(index ^ first) ^ second)


def choose(edges: list[int], fanout: int, node: int, relation: int, seed: int) -> list[int]:
    """The edges of a node that are drawn, by slot."""
    if len(edges) <= fanout:
        return edges
    picks: list[int] = []
    for slot in range(fanout):
        last = len(edges) - fanout + slot
        drawn = word(node, seed, 16 * relation + slot) * (last + 1) >> 32
        picks.append(last if drawn in picks else drawn)
    return [edges[pick] for pick in picks]


def sampled(graph: Graph, fanouts: tuple[int, ...], seeds: list[int], seed: int) -> dict[str, Any]:
    """Return the expected :func:`filled` of a block with enough capacity."""
    schema, relations = graph.schema, range(len(graph.schema.relations))
    nodes: list[list[int]] = [[] for _ in schema.types]
    nodes[schema.seed_type] = list(seeds)
    within, edges_within, rows_within = [[len(each) for each in nodes]], [], []
    edges: list[list[tuple[int, int]]] = [[] for _ in relations]  # target and source, by their places in ``nodes``
    rows: list[list[int]] = [[] for _ in relations]
    expanded = [0] * len(nodes)
    for fanout in fanouts:
        frontier = [range(first, len(each)) for first, each in zip(expanded, nodes, strict=True)]
        expanded = [len(each) for each in nodes]
        for relation in relations:
            found = nodes[schema.sources[relation]]
            for place in frontier[schema.targets[relation]]:
                node = nodes[schema.targets[relation]][place]
                for source in choose(neighbours(graph, relation, node), fanout, node, relation, seed):
                    if source not in found:
                        found.append(source)
                    edges[relation].append((place, found.index(source)))
                    if found.index(source) not in rows[relation]:
                        rows[relation].append(found.index(source))
        within.append([len(each) for each in nodes])
        edges_within.append([len(each) for each in edges])
        rows_within.append([len(each) for each in rows])
    found_relations = []
    for relation in relations:
        pairs, each_row = edges[relation], rows[relation]
        targets, inner = within[-2][schema.targets[relation]], within[-2][schema.sources[relation]]
        transposed = [[edge for edge, (_, source) in enumerate(pairs) if source == row] for row in each_row]
        found_relations.append(
            {
                "indptr": [sum(target < place for target, _ in pairs) for place in range(targets + 1)],
                "edge_row": [each_row.index(source) for _, source in pairs],
                "edge_target": [target for target, _ in pairs],
                "rows": each_row,
                "node_row": [each_row.index(place) if place in each_row else -1 for place in range(inner)],
                "row_indptr": [sum(map(len, transposed[:row])) for row in range(len(each_row) + 1)],
                "row_edges": [edge for each in transposed for edge in each],
            }
        )
    counts = {"nodes_within": within, "edges_within": edges_within, "rows_within": rows_within, "overflow": [0]}
    return {**counts, "nodes": nodes, "relations": found_relations}


def filled(block: SampledBlock) -> dict[str, Any]:
    """Return all used entries of a block, as lists."""
    shape, schema = block.shape, block.shape.schema
    nodes, edges, rows = (counts.tolist() for counts in (block.node_counts, block.edge_counts, block.row_counts))

    def part(tensor: torch.Tensor, first: int, count: int) -> list[int]:
        return tensor[first : first + count].tolist()

    relations = []
    for relation, (source, target) in enumerate(zip(schema.sources, schema.targets, strict=True)):
        first, edge_count, row_count = shape.edge_offsets[relation], edges[-1][relation], rows[-1][relation]
        relations.append(
            {
                "indptr": part(block.indptr, shape.indptr_offsets[relation], nodes[-2][target] + 1),
                "edge_row": part(block.edge_row, first, edge_count),
                "edge_target": part(block.edge_target, first, edge_count),
                "rows": part(block.rows, shape.row_offsets(shape.hops)[relation], row_count),
                "node_row": part(block.node_row, shape.node_row_offsets[relation], nodes[-2][source]),
                "row_indptr": part(block.row_indptr, shape.row_indptr_offsets[relation], row_count + 1),
                "row_edges": part(block.row_edges, first, edge_count),
            }
        )
    offsets = shape.node_offsets(shape.hops)
    return {
        "nodes_within": nodes,
        "edges_within": edges,
        "rows_within": rows,
        "overflow": block.overflow.tolist(),
        "nodes": [part(block.nodes, first, count) for first, count in zip(offsets, nodes[-1], strict=False)],
        "relations": relations,
    }


SMALL_CAPACITIES = [
    ("nodes", 1, "paper"),
    ("nodes", 2, "author"),
    ("nodes", 3, "paper"),
    ("edges", 0, "paper__cites__paper"),
    ("edges", 1, "author__rev_by__paper"),
    ("edges", 2, "paper__by__author"),
    ("rows", 0, "paper__cites__paper"),
    ("rows", 2, "paper__cites__paper"),
]
"""Table of :class:`BlockShape`, line of it, and the type or relation with little capacity."""


def smaller(block: SampledBlock, shape: BlockShape, table: str, hop: int, name: str) -> BlockShape:
    """``shape`` where the named type or relation has two entries less than ``block`` needs."""
    counts = {"nodes": block.node_counts, "edges": block.edge_counts, "rows": block.row_counts}[table].tolist()
    names = shape.schema.types if table == "nodes" else [str(relation) for relation in shape.schema.relations]
    place = list(names).index(name)
    lines = [list(line) for line in getattr(shape, table)]
    for before in range(hop + 1):
        lines[before][place] = min(lines[before][place], counts[hop][place] - 2)
    return replace(shape, **{table: tuple(map(tuple, lines))})
