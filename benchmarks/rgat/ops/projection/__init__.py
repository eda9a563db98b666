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

from typing import Any

from torch import Tensor

from benchmarks.rgat.ops.projection.plain import (
    MOST_COLUMNS,
    Projected,
    Projection,
    input_gradient_torch,
    project_torch,
    target_terms_gradient_torch,
    target_terms_torch,
    weight_gradient_torch,
)
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported


# triton is imported only where it is used
def _project_triton(*args: Any, **kwargs: Any) -> Projected:
    from benchmarks.rgat.ops.projection import triton

    return triton.project(*args, **kwargs)


def _weight_gradient_triton(*args: Any, **kwargs: Any) -> Tensor:
    from benchmarks.rgat.ops.projection import triton

    return triton.weight_gradient(*args, **kwargs)


def _target_terms_triton(*args: Any, **kwargs: Any) -> Tensor:
    from benchmarks.rgat.ops.projection import triton

    return triton.target_terms(*args, **kwargs)


def _target_terms_gradient_triton(*args: Any, **kwargs: Any) -> Tensor:
    from benchmarks.rgat.ops.projection import triton

    return triton.target_terms_gradient(*args, **kwargs)


def _input_gradient_triton(*args: Any, **kwargs: Any) -> Tensor:
    from benchmarks.rgat.ops.projection import triton

    return triton.input_gradient(*args, **kwargs)


def unsupported(request: OperationRequest) -> str | None:
    """Why our kernels cannot serve a request of ``heads`` and ``head_size``, whose dtype is the weight's."""
    heads, head_size = request.sizes["heads"], request.sizes["head_size"]
    if heads * head_size > MOST_COLUMNS and MOST_COLUMNS % head_size:
        return f"{heads} heads of {head_size} are not whole heads of {MOST_COLUMNS} columns"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        Projection(
            _project_triton,
            _weight_gradient_triton,
            _target_terms_triton,
            _target_terms_gradient_triton,
            _input_gradient_triton,
        ),
        unsupported,
    ),
    "torch": Implementation(
        "torch",
        Projection(
            project_torch,
            weight_gradient_torch,
            target_terms_torch,
            target_terms_gradient_torch,
            input_gradient_torch,
        ),
        always,
    ),
}
"""Functions: :class:`Projection`. Sizes of the request: ``heads``, ``head_size``."""

KERNEL_NAMES = (("products", r"^projection_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
