"""The reference of :mod:`common.ops.local_convolution`, and the interface of all implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LocalConvolution:
    """Forward and gradients.

    Attributes:
        forward: (x_NCDHW, weight (C out, C in, 3, 3, 3), stride) to y_NCDHW.
        backward: (dy_NCDHW, x_NCDHW, weight, stride, needs) to the gradients of x and of the weight, each None
            where ``needs`` is False for it.
    """

    forward: Callable[[Tensor, Tensor, int], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, int, tuple[bool, bool]], tuple[Tensor | None, Tensor | None]]


def forward(x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The convolution."""
    return F.conv3d(x_NCDHW, weight, stride=stride, padding=1)


def backward(
    dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, where they are needed."""
    dx_NCDHW, dweight, _ = torch.ops.aten.convolution_backward(
        dy_NCDHW, x_NCDHW, weight, None, [stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [*needs, False]
    )
    return dx_NCDHW, dweight


def local_convolution_reference() -> LocalConvolution:
    """That of PyTorch, which is cuDNN's on a GPU."""
    return LocalConvolution(forward, backward)
