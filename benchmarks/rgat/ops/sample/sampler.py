"""Interface of all samplers. H hops, R relations, S seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.graph import LARGEST, Graph

SITES = 16
"""Random words per node and relation, one for each slot; the maximum fanout."""

UNSEEN = LARGEST
"""Stamp of a node that no edge has reached. A numbered node has -1 - number, which is less than every position."""


class Sampler(Protocol):
    """Sampler of blocks from one graph. All samplers of a graph share its stamps, so only one stream may use them."""

    def __call__(self, seeds: Tensor, count: Tensor | int, seed: Tensor) -> Block:
        """Return a new block around ``seeds``.

        Args:
            seeds: [S], int32: distinct nodes of the seed type.
            count: number of real seeds, which are the first ones, on the device or as a number; the rest is not read.
            seed: random seed, int64, one number on the device. Draws are a function of seed, relation, node and slot.
        """


def require_room(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> None:
    """Check that a sampler can serve these arguments.

    Raises:
        ValueError: fanouts are out of range or do not match the hops; the schema differs; a relation has capacity for
            edges but none for a node or row; or a tensor has more entries than int32 can number.
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
