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

from typing import Any

from torch import Tensor

from benchmarks.rgat.ops.edge_attention.plain import EdgeAttention, backward_torch, forward_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported


def _forward_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from benchmarks.rgat.ops.edge_attention import triton  # triton is imported only where it is used

    return triton.forward(*args, **kwargs)


def _backward_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from benchmarks.rgat.ops.edge_attention import triton  # triton is imported only where it is used

    return triton.backward(*args, **kwargs)


def _unsupported(request: OperationRequest) -> str | None:
    heads = request.sizes.get("heads", 1)
    if heads & (heads - 1):
        return f"{heads} heads, and a power of two is needed"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", EdgeAttention(_forward_triton, _backward_triton), _unsupported),
    "torch": Implementation("torch", EdgeAttention(forward_torch, backward_torch), always),
}
"""Functions: :class:`EdgeAttention`; a request's size is ``heads``."""

KERNEL_NAMES = (("attention over edges", r"^edge_attention_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
