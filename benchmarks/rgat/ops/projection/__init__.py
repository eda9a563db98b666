"""Products of a convolution: for each relation a projection of those nodes alone that an edge reads, and its gradients.

Of relation r with weight W and attention vectors a_source and a_target of each head, an edge from j to i needs z_j =
x_j W, the source's term z_j a_source and the target's term x_i W a_target. A node is projected for a relation if
it has an edge in it: a row of the block, three to five times fewer than every node for every relation of its type. A
target needs no projection, as W a_target is a matrix v of one column a head.

Rows are gathered where the product reads them, and the features' e4m3 becomes the product's dtype there. All relations
are one launch. The functions work without autograd: with the gradients of z, to which the caller has added what comes
by way of the source's term, and of the target's terms, the caller puts the backward pass together.

Legend: N nodes within ``level`` hops, M rows and T pairs of relation and target at ``level``, K inputs, D = A d outputs
of A heads, R relations.
"""

from __future__ import annotations

from benchmarks.rgat.ops.projection.reference import (
    MOST_COLUMNS,
    Projection,
    input_gradient_reference,
    project_reference,
    target_terms_gradient_reference,
    target_terms_reference,
    weight_gradient_reference,
)
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported


def unsupported(request: OperationRequest) -> str | None:
    """Why our kernels cannot serve a request of ``heads`` and ``head_size``, whose dtype is the weight's."""
    heads, head_size = request.sizes["heads"], request.sizes["head_size"]
    if heads * head_size > MOST_COLUMNS and MOST_COLUMNS % head_size:
        return f"{heads} heads of {head_size} are not whole heads of {MOST_COLUMNS} columns"
    return triton_unsupported(request)


PROJECTION = Operation(
    "projection",
    Projection(
        project_reference,
        weight_gradient_reference,
        target_terms_reference,
        target_terms_gradient_reference,
        input_gradient_reference,
    ),
    {
        "triton": Implementation("benchmarks.rgat.ops.projection.triton", unsupported),
    },
    kernel_names=(("products", r"^projection_"),),
    cases="benchmarks.rgat.ops.projection.cases",
)
"""Functions: :class:`Projection`. Sizes of the request: ``heads``, ``head_size``."""
