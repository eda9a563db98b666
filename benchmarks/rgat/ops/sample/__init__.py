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

from benchmarks.rgat.ops.sample.reference import sampler_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

SAMPLE = Operation(
    "sample",
    sampler_reference,
    {
        "triton": triton_kernels("benchmarks.rgat.ops.sample.triton:triton_sampler", dtypes=()),
    },
    kernel_names=(("sample", r"^sample_"),),
    cases="benchmarks.rgat.ops.sample.cases",
)
"""Signature: ``build(graph, fanouts, shape) -> Sampler``; see :mod:`benchmarks.rgat.ops.sample.sampler`."""
