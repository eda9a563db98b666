"""Products of a convolution: for each relation, projection of the nodes that its edges read, and the gradients.

For a relation with weight W and attention vectors a_source and a_target per head, an edge from j to i needs z_j = x_j
W, the source term z_j a_source and the target term x_i W a_target. A node is projected for a relation only if it is
the source of an edge in it, which is a row of the block. These are three to five times fewer than all nodes for every
relation of their type. Targets need no projection, because W a_target is a matrix v with one column per head.

The kernels gather rows inside the product and convert e4m3 features to its dtype there. All relations are one launch.
The functions work without autograd. The caller composes the backward pass: it adds the gradient through the source
term to that of z, and passes the gradient of the target terms.

Shapes: N nodes within ``level`` hops, M rows and T pairs of relation and target at ``level``, K inputs, D = A d
outputs of A heads, R relations.
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
    """Return why our kernels cannot serve a request, whose dtype is that of the weight; None if they can."""
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
"""Functions: :class:`Projection`. Sizes of a request: ``heads``, ``head_size``."""
