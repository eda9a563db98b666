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

from benchmarks.rgat.ops.projection.plain import (
    Projection,
    input_gradient_torch,
    project_torch,
    target_terms_gradient_torch,
    target_terms_torch,
    weight_gradient_torch,
)
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {
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
"""Functions: :class:`Projection`."""
