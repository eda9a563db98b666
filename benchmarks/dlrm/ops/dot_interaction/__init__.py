"""Dot interaction: the products of all pairs of a sample's vectors, behind the first of these vectors.

Naumov et al., arXiv:1906.00091, section 2.1. Shapes: B samples, F vectors (the bottom MLP's and one of every table), W
width of a vector, Y columns of the result.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.dlrm.ops.dot_interaction.plain import dot_interaction_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _triton(x_BFW: Tensor, columns: int) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.dlrm.ops.dot_interaction.triton import dot_interaction

    return dot_interaction(x_BFW, columns)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _triton, triton_unsupported),
    "torch": Implementation("torch", dot_interaction_torch, always),
}
"""Signature: ``dot_interaction(x_BFW, columns)``."""

KERNEL_NAMES = (("dot interaction", r"^dot_interaction_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
