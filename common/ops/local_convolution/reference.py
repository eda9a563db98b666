"""Reference implementation of :mod:`common.ops.local_convolution`, and the interface of all implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LocalConvolution:
    """Functions of an implementation: the convolution and its gradients.

    Attributes:
        forward: maps (x_NCDHW, weight (C out, C in, 3, 3, 3), stride) to y_NCDHW.
        backward: maps (dy_NCDHW, x_NCDHW, weight, stride, needs) to the gradients of x and of the weight. ``needs``
            says which of the two are needed; the others are None.
    """

    forward: Callable[[Tensor, Tensor, int], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, int, tuple[bool, bool]], tuple[Tensor | None, Tensor | None]]


def forward(x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the convolution, padded with zeros."""
    return F.conv3d(x_NCDHW, weight, stride=stride, padding=1)


def backward(
    dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight; None for a gradient that is not needed."""
    dx_NCDHW, dweight, _ = torch.ops.aten.convolution_backward(
        dy_NCDHW, x_NCDHW, weight, None, [stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [*needs, False]
    )
    return dx_NCDHW, dweight


def local_convolution_reference() -> LocalConvolution:
    """Return PyTorch's convolution, which is cuDNN's on a GPU."""
    return LocalConvolution(forward, backward)
