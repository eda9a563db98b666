"""Products by PyTorch, and the pass in front of the ReLU by the Triton kernel of :mod:`common.ops.tiling`.

Everything is enqueued on the current stream and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.linear_relu.reference import Passes, apply
from common.ops.tile import Tile
from common.ops.tiling.relu_gradient import relu_gradient

TILES: dict[str, Tile] = {"gradient": Tile(columns=128, elements=4096, warps=4, programs=4, stages=2)}
"""Pass to its tile."""


def forward(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Bias and ReLU in the epilogue of cuBLASLt's product; on a CPU one after another."""
    y_BN: Tensor = torch._addmm_activation(bias_N, x_BK, weight_NK.t())
    return y_BN


def masked(dy_BN: Tensor, y_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in front of the ReLU, and the bias's in fp32."""
    if dy_BN.stride(1) != 1:
        dy_BN = dy_BN.contiguous()
    dz_BN = torch.empty_like(y_BN)
    d_bias_N = relu_gradient(TILES["gradient"], dy_BN, y_BN, dz_BN, summed=True)
    assert d_bias_N is not None
    return dz_BN, d_bias_N


PASSES = Passes(forward, masked)


def linear_relu(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """See :func:`common.ops.linear_relu.reference.linear_relu_reference`."""
    return apply(PASSES, x_BK, weight_NK, bias_N)
