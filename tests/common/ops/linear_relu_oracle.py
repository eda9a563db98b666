"""A linear layer with ReLU and its gradients by the formula, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Of a layer, and the gradient of its result."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor


def inputs(samples: int, columns: int, outputs: int, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Made-up values of magnitude one."""
    random = torch.Generator(device).manual_seed(columns * outputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    weight = normal(outputs, columns) / columns**0.5
    values = (normal(samples, columns), weight, normal(outputs), normal(samples, outputs))
    return Inputs(*(value.to(dtype) for value in values))


def expected(given: Inputs, mask: Tensor | None = None) -> list[Tensor]:
    """Result and gradients of x, weight and bias, of the values that the dtype holds.

    Args:
        given: the layer.
        mask: where the gradient passes the ReLU; where the result is positive unless it is given.
    """
    x, weight, bias, dy = (value.double() for value in given)
    z = torch.einsum("bk,nk->bn", x, weight) + bias
    dz = dy * (z > 0 if mask is None else mask)
    return [z.clamp(min=0), torch.einsum("bn,nk->bk", dz, weight), torch.einsum("bn,bk->nk", dz, x), dz.sum(0)]
