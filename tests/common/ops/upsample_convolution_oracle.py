"""Upsampling and convolution in float64, from nine shifted copies of a picture whose places were repeated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def inputs(
    pictures: int, channels: int, filters: int, height: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """x and the result's gradient in channels_last, weight and bias between them."""
    random = torch.Generator(device).manual_seed(channels)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=torch.float64).to(dtype)

    x, dy = (
        normal(*shape).contiguous(memory_format=torch.channels_last)
        for shape in ((pictures, channels, height, width), (pictures, filters, 2 * height, 2 * width))
    )
    weight = normal(filters, channels, 3, 3) / (9 * channels) ** 0.5
    return [x, weight, normal(filters), dy]


def expected(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """Result, and gradients of x, weight and bias, float64."""
    leaves = [value.detach().double().requires_grad_() for value in (x, weight, bias)]
    x, weight, bias = leaves
    height, width = (2 * size for size in x.shape[2:])
    repeated = F.pad(x.repeat_interleave(2, 2).repeat_interleave(2, 3), (1, 1, 1, 1))
    y = bias.view(1, -1, 1, 1)
    for row in range(3):
        for column in range(3):
            shifted = repeated[:, :, row : row + height, column : column + width]
            y = y + torch.einsum("oi,nihw->nohw", weight[:, :, row, column], shifted)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
