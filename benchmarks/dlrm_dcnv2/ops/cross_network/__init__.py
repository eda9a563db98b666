"""Low-rank cross network: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

Wang et al., arXiv:2008.13535, equation 1 with a weight of two factors and no nonlinearity between them.
Shapes: B samples, X inputs, R rank.
"""

from __future__ import annotations

from benchmarks.dlrm_dcnv2.ops.cross_network.plain import cross_network_torch
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {
    "torch": Implementation("torch", cross_network_torch, always),
}
"""Signature: ``cross_network(x0_BX, v, w, b)``, with V, W and b of every layer."""
