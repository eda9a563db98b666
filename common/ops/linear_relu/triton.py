"""Linear layer with ReLU: products by PyTorch, and a Triton kernel for the gradient in front of the ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.linear_relu import LinearReluPasses, apply
from common.ops.relu_gradient import relu_gradient
from common.ops.tile import Tile

TILES: dict[str, Tile] = {"gradient": Tile(columns=128, elements=4096, warps=4, programs=4, stages=2)}
"""Tile of each pass."""


def forward(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return ``relu(x weight^T + bias)``, (B, N). Bias and ReLU are in cuBLASLt's epilogue; on a CPU they follow it."""
    y_BN: Tensor = torch._addmm_activation(bias_N, x_BK, weight_NK.t())
    return y_BN


def masked(dy_BN: Tensor, y_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy where y > 0, else 0: the gradient before the ReLU, (B, N); and its column sums: that of the bias.

    The column sums are fp32.
    """
    if dy_BN.stride(1) != 1:
        dy_BN = dy_BN.contiguous()
    dz_BN = torch.empty_like(y_BN)
    d_bias_N = relu_gradient(TILES["gradient"], dy_BN, y_BN, dz_BN, summed=True)
    assert d_bias_N is not None
    return dz_BN, d_bias_N


PASSES = LinearReluPasses(forward, masked)


def linear_relu(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return ``relu(x weight^T + bias)``, (B, N); see :func:`common.ops.linear_relu.linear_relu_reference`."""
    return apply(PASSES, x_BK, weight_NK, bias_N)
