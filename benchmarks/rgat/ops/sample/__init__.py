"""Sampling of blocks: for each seed some neighbours per relation, then their neighbours, and so on.

Hop h takes min(degree, fanout) edges of every relation into the nodes that hop h - 1 discovered, uniformly without
replacement among edge positions, so duplicate edges count separately. A node is expanded once. Slot k of a node with
d > F edges draws t = (word * (d - F + k + 1)) >> 32, where word is that of :mod:`common.ops.random_bits` for the node
at site 16 * relation + k, and takes position t, or d - F + k if an earlier slot has taken t. Edges are ordered by
target and slot.

Nodes are numbered without a sort. Each node of the graph has a stamp, which receives the smallest position of the
edges that reach it. The edge whose position is the stamp opens the node, and a prefix sum over these edges numbers
the nodes. All implementations return bitwise the same block, regardless of earlier calls.

If a capacity is too small, ``overflow`` is nonzero and the block is truncated but consistent: all counts are within
the capacities, and an edge whose source or row exceeds the capacity at its hop refers to the last one within it.
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
"""Signature: ``build(graph, fanouts, shape) -> NeighborSampler``; see :mod:`benchmarks.rgat.ops.sample.reference`."""
