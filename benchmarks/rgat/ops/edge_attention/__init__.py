"""Attention over the edges of a sampled block: what a convolution does once its rows are projected.

Velickovic et al., arXiv:1710.10903, section 2.1, for each relation, and sums over the relations into a type
(Schlichtkrull et al., arXiv:1703.06103, section 2.1, without their norm and self-connection). Target i of a type gets
from the relations r into it

    sum_r ( sum_e alpha_e z[row(e)] + bias_r )
    alpha = softmax_e( leaky_relu(source_term[row(e)] + target_term[r, i]) )

e being its edges of the relation, and alpha one number a head; then perhaps a leaky ReLU, then dropout. A target
without edges in a relation gets that one's bias alone. Terms, shares and sums are fp32.

The functions work without autograd. Shapes, for the convolution whose inputs lie at ``level`` of a block: M rows of all
relations (``shape.row_offsets(level)``), T targets of all relations (``shape.target_offsets(level)``), P output nodes,
those within level - 1 hops of all types (``shape.node_offsets(level - 1)``), R relations, A heads, d features of a
head, D = A d. Of rows, targets and nodes only those that the block's counts say are read.
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
"""Functions: :class:`EdgeAttention`; a request's size is ``heads``."""
