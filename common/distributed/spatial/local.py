"""The convolution of one slab by itself, forward and gradients, and its implementations.

3x3x3, padded with a plane of zeros on every side, without bias. :mod:`common.distributed.spatial.convolution` makes of
it the convolution of a whole volume. Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.implementation import Implementation, always


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


def _forward(x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    return F.conv3d(x_NCDHW, weight, stride=stride, padding=1)


def _backward(
    dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    dx_NCDHW, dweight, _ = torch.ops.aten.convolution_backward(
        dy_NCDHW, x_NCDHW, weight, None, [stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [*needs, False]
    )
    return dx_NCDHW, dweight


def _torch() -> LocalConvolution:
    return LocalConvolution(_forward, _backward)


IMPLEMENTATIONS = {"torch": Implementation("torch", _torch, always)}
"""``function`` returns a :class:`LocalConvolution`. PyTorch's takes cuDNN on a GPU."""
