"""What every implementation of the sampler agrees on. H hops, R relations, S seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.graph import LARGEST, Graph

SITES = 16
"""Random words of a node in a relation, one for each slot: no fanout is larger."""

UNSEEN = LARGEST
"""Stamp of a node that no edge has reached. One that is known has -1 - its number, smaller than every position."""


class Sampler(Protocol):
    """Samples blocks from one graph, whose samplers share a stamp for every node: one stream at a time uses them."""

    def __call__(self, seeds: Tensor, count: Tensor | int, seed: Tensor) -> Block:
        """A new block around ``seeds``.

        Args:
            seeds: [S], int32: distinct nodes of the type of seeds.
            count: so many of them are there, the rest is not read; on the device, or a number.
            seed: int64, one number on the device; draws are a function of it, relation, node and slot.
        """


def require_room(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> None:
    """Refuse what no sampler can serve.

    Raises:
        ValueError: fanouts out of range or of other hops than the shape's; another schema; a shape without room for
            a node or a row where it has room for edges, or one beyond what int32 numbers.
    """
    if len(fanouts) != shape.hops or not all(1 <= fanout <= SITES for fanout in fanouts):
        raise ValueError(f"fanouts={list(fanouts)}: one for each of {shape.hops} hops, 1 to {SITES}")
    if shape.schema != graph.schema:
        raise ValueError("the shape is one of another schema")
    for hop in range(shape.hops):
        for relation, source in enumerate(graph.schema.sources):
            room = min(shape.nodes[hop + 1][source], shape.rows[hop][relation])
            if shape.edges[hop][relation] > 0 and room < 1:
                raise ValueError(f"hop {hop + 1}: {graph.schema.relations[relation]} has room for edges and no row")
    drawn = [
        sum(shape.nodes[hop][target] for target in graph.schema.targets) * fanout for hop, fanout in enumerate(fanouts)
    ]
    row_stamps = sum(shape.nodes[-1][source] for source in graph.schema.sources)
    most = max(*drawn, shape.edge_offsets[-1], shape.row_indptr_offsets[-1], row_stamps)
    if most > LARGEST:
        raise ValueError(f"{most:,} entries of a block are more than int32 numbers: take fewer seeds")
