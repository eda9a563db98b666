"""Attention over the edges of a sampled block: the part of a convolution after the projection of rows.

Velickovic et al., arXiv:1710.10903, section 2.1, per relation, summed over the relations into a type (Schlichtkrull
et al., arXiv:1703.06103, section 2.1, without norm and self-connection). The relations r into its type give target i

    sum_r ( sum_e alpha_e z[row(e)] + bias_r )
    alpha = softmax_e( leaky_relu(source_term[row(e)] + target_term[r, i]) )

where e are the target's edges in the relation, and alpha has one number per head. An optional leaky ReLU and dropout
follow. A target without edges in a relation gets only its bias. Terms, attention weights and sums are fp32.

The functions work without autograd. Shapes, for the convolution with inputs at ``level`` of a block: M rows of all
relations (``shape.row_offsets(level)``), T targets of all relations (``shape.target_offsets(level)``), P output
nodes, those within level - 1 hops of all types (``shape.node_offsets(level - 1)``), R relations, A heads, d features
per head, D = A d. Only entries that the block's counts include are read.
"""

from __future__ import annotations

from benchmarks.rgat.ops.edge_attention.reference import EdgeAttention, backward_reference, forward_reference
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported


def _unsupported(request: OperationRequest) -> str | None:
    heads = request.sizes.get("heads", 1)
    if heads & (heads - 1):
        return f"{heads} heads, and a power of two is needed"
    return triton_unsupported(request)


EDGE_ATTENTION = Operation(
    "edge_attention",
    EdgeAttention(forward_reference, backward_reference),
    {
        "triton": Implementation("benchmarks.rgat.ops.edge_attention.triton", _unsupported),
    },
    kernel_names=(("attention over edges", r"^edge_attention_"),),
    cases="benchmarks.rgat.ops.edge_attention.cases",
)
"""Functions: :class:`EdgeAttention`; the request needs the size ``heads``."""
