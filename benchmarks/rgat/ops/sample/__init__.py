"""Sampling of blocks: for each seed its neighbours, theirs, and so on, so many by each relation.

Hop h takes min(degree, fanout) edges of every relation into the nodes that hop h - 1 found, uniform without replacement
among their positions, so that duplicate edges count apart. A node is expanded once. Slot k of a node with d > F edges
draws t = (word * (d - F + k + 1)) >> 32, the word being that of :mod:`common.ops.random_bits` for the node at site
16 * relation + k, and takes d - F + k where an earlier slot has t. Edges stand in the order of targets and slots.

Nodes are numbered without a sort: each node of the graph has a stamp, in which edges leave the smallest position of
those that reach it. An edge that finds its own opens the node, and a prefix sum over these numbers them. All versions
return the same block bit by bit, whatever ran before them.

Where the room is too small, ``overflow`` is not 0 and the block is cut but whole: all counts are within the room, and
an edge whose source or row has no room at its hop has the last one that has.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.ops.sample.plain import plain_sampler
from benchmarks.rgat.ops.sample.sampler import Sampler
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton


def _triton_sampler(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> Sampler:
    from benchmarks.rgat.ops.sample.triton import triton_sampler  # triton is imported only where it is used

    return triton_sampler(graph, fanouts, shape)


def _unsupported(request: OperationRequest) -> str | None:
    return no_triton(request.device)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _triton_sampler, _unsupported),
    "torch": Implementation("torch", plain_sampler, always),
}
"""Signature: ``build(graph, fanouts, shape) -> Sampler``; see :mod:`benchmarks.rgat.ops.sample.sampler`."""

KERNEL_NAMES = (("sample", r"^sample_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
