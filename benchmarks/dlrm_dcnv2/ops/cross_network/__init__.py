"""Low-rank cross network: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

Wang et al., arXiv:2008.13535, equation 1 with a weight of two factors and no nonlinearity between them. Autograd has
a node for each layer; the gradient of x_0, of which every layer has a part, goes from one to the next.
Shapes: B samples, X inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from benchmarks.dlrm_dcnv2.ops.cross_network.plain import cross_network_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _triton(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.dlrm_dcnv2.ops.cross_network.triton import cross_network

    return cross_network(x0_BX, v, w, b)


def _fused(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    from benchmarks.dlrm_dcnv2.ops.cross_network.triton import cross_network_fused

    return cross_network_fused(x0_BX, v, w, b)


IMPLEMENTATIONS = {
    "fused": Implementation("fused", _fused, triton_unsupported),
    "triton": Implementation("triton", _triton, triton_unsupported),
    "torch": Implementation("torch", cross_network_torch, always),
}
"""Signature: ``cross_network(x0_BX, v, w, b)``, with V, W and b of every layer.

``triton`` has the cross in the epilogue of a product of ours, and what follows the gradient of a layer's input in that
of another. ``fused`` has all products and the cross from PyTorch, and one pass of ours in the backward pass of a
layer."""

KERNEL_NAMES = (("cross network", r"^cross_(product|between|gradient)_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
