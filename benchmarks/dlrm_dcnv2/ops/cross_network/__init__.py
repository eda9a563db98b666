"""Low-rank cross network: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

Wang et al., arXiv:2008.13535, equation 1, with a weight of two factors and no nonlinearity between them. Every layer
has its own autograd node; the gradient of x_0 is accumulated from layer to layer.

Shapes: B samples, X inputs, R rank.
"""

from __future__ import annotations

from benchmarks.dlrm_dcnv2.ops.cross_network.reference import cross_network_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

CROSS_NETWORK = Operation(
    "cross_network",
    cross_network_reference,
    {
        "fused": triton_kernels("benchmarks.dlrm_dcnv2.ops.cross_network.triton:cross_network"),
    },
    former={"triton": "fused"},
    kernel_names=(("cross network", r"^cross_gradient_"),),
    cases="benchmarks.dlrm_dcnv2.ops.cross_network.cases",
)
"""Signature: ``cross_network(x0_BX, v, w, b)``, with V, W and b of every layer.

``fused`` uses one of our kernels per layer in the backward pass; PyTorch computes the matrix products."""
