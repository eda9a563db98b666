"""The dot interaction by loops over pairs, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def interaction(x_BFW: Tensor, columns: int) -> Tensor:
    """First vector, products pair by pair, zeros."""
    found = [x_BFW[:, 0]]
    for i in range(x_BFW.shape[1]):
        for j in range(i):
            found.append((x_BFW[:, i] * x_BFW[:, j]).sum(1, keepdim=True))
    used = torch.cat(found, 1)
    return torch.cat([used, used.new_zeros(len(used), columns - used.shape[1])], 1)


def expected(x_BFW: Tensor, dy_BY: Tensor) -> tuple[Tensor, Tensor]:
    """Result and gradient, of the values that the dtype holds."""
    x = x_BFW.detach().double().requires_grad_()
    y = interaction(x, dy_BY.shape[1])
    return y.detach(), torch.autograd.grad(y, x, dy_BY.double())[0]


def inputs(
    samples: int, vectors: int, width: int, columns: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Made-up vectors and gradient, of magnitude one."""
    random = torch.Generator(device).manual_seed(vectors)
    x = torch.randn(samples, vectors, width, generator=random, device=device)
    return x.to(dtype), torch.randn(samples, columns, generator=random, device=device).to(dtype)
