"""Dot interaction: products of all pairs of a sample's vectors, appended to the first vector.

Naumov et al., arXiv:1906.00091, section 2.1. Shapes: B samples, F vectors (one of the bottom MLP and one per table),
W width of a vector, Y columns of the result.
"""

from __future__ import annotations

from benchmarks.dlrm.ops.dot_interaction.reference import dot_interaction_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

DOT_INTERACTION = Operation(
    "dot_interaction",
    dot_interaction_reference,
    {
        "triton": triton_kernels("benchmarks.dlrm.ops.dot_interaction.triton:dot_interaction"),
    },
    kernel_names=(("dot interaction", r"^dot_interaction_"),),
    cases="benchmarks.dlrm.ops.dot_interaction.cases",
)
"""Signature: ``dot_interaction(x_BFW, columns)``."""
