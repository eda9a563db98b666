"""The cross network by its formula in float64, with the gradients of PyTorch's autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Inputs of a network, and the gradient of its result."""

    x0: Tensor
    v: list[Tensor]
    w: list[Tensor]
    b: list[Tensor]
    dy: Tensor

    def leaves(self) -> list[Tensor]:
        """Inputs that get a gradient."""
        return [self.x0, *self.v, *self.w, *self.b]


def inputs(samples: int, columns: int, rank: int, layers: int, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Made-up values of magnitude one."""
    random = torch.Generator(device).manual_seed(columns * rank + layers)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    v = [(normal(rank, columns) / columns**0.5).to(dtype) for _ in range(layers)]
    w = [(normal(columns, rank) / rank**0.5).to(dtype) for _ in range(layers)]
    b = [normal(columns).to(dtype) for _ in range(layers)]
    return Inputs(normal(samples, columns).to(dtype), v, w, b, normal(samples, columns).to(dtype))


def network(x0: Tensor, v: list[Tensor], w: list[Tensor], b: list[Tensor]) -> Tensor:
    """Layer by layer."""
    x = x0
    for v_l, w_l, b_l in zip(v, w, b, strict=True):
        x = x0 * (torch.einsum("xr,ry,by->bx", w_l, v_l, x) + b_l) + x
    return x


def expected(given: Inputs) -> list[Tensor]:
    """Result, and gradients of x0 and of every V, W and b, of the values that the dtype holds."""
    x0, *rest = [leaf.detach().double().requires_grad_() for leaf in given.leaves()]
    layers = len(given.v)
    y = network(x0, rest[:layers], rest[layers : 2 * layers], rest[2 * layers :])
    return [y.detach(), *torch.autograd.grad(y, [x0, *rest], given.dy.double())]
