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

from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported, widen


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


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.sizes["channels"] != 1:
        return f"the kernels take 1 input channel, not {request.sizes['channels']}"
    return triton_unsupported(request)


def _triton() -> LocalConvolution:
    # triton is imported only where it is used
    from common.distributed.spatial import local_triton

    def backward(
        dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        # an image rarely needs a gradient, so it has no kernel
        dx_NCDHW, _ = _backward(dy_NCDHW, x_NCDHW, weight, stride, (True, False)) if needs[0] else (None, None)
        return dx_NCDHW, local_triton.weight_gradient(dy_NCDHW, x_NCDHW, weight, stride) if needs[1] else None

    return LocalConvolution(local_triton.forward, backward)


def fold_width(x_NCDHW: Tensor) -> Tensor:
    """Neighbours along W, W being even, as one voxel of twice the channels: a view of channels_last_3d memory."""
    N, C, D, H, W = x_NCDHW.shape
    return x_NCDHW.permute(0, 2, 3, 4, 1).reshape(N, D, H, W // 2, 2 * C).permute(0, 4, 1, 2, 3)


def folded_weight_gradient(dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the weight, with stride 1, out of that of a convolution of half the width and twice the channels.

    A pair of outputs 2 j, 2 j + 1 meets the pairs of inputs j - 1, j, j + 1. Tap k of the kernel joins output 2 j + p
    with input 2 j + p + k - 1, which is number q of pair j + t - 1 for 2 (t - 1) + q = p + k - 1: every tap appears in
    two of the twelve combinations of p, q and t, and six of them are none's. So cuDNN computes twice as much, but in
    kernels for 64 channels, which use the tensor cores more than twice as well as those for 32. On an H200 (7 volumes
    of 128^3, bf16, cuDNN 9.19) 32 -> 32 channels take 3.53 ms instead of 5.04, 64 -> 32 take 5.28 instead of 7.17;
    folding forward or the gradient of x gains less than a tenth.
    """
    C_out, C_in = weight.shape[:2]
    folded = weight.new_empty((2 * C_out, 2 * C_in, 3, 3, 3)).to(memory_format=torch.channels_last_3d)
    _, dfolded = _backward(fold_width(dy_NCDHW), fold_width(x_NCDHW), folded, 1, (False, True))
    assert dfolded is not None
    wide = widen(dfolded).view(2, C_out, 2, C_in, 3, 3, 3)
    taps = [torch.stack([wide[p, :, q, ..., t] for p, q, t in combinations]).sum(0) for combinations in _FOLDED_TAPS]
    return torch.stack(taps, -1).to(weight.dtype)


_FOLDED_TAPS = [[(p, (p + k - 1) % 2, (p + k - 1) // 2 + 1) for p in range(2)] for k in range(3)]
"""Combinations (p, q, t) of each tap k."""
FOLDED_CHANNELS = 32
"""Output channels up to which the gradient of the weight is folded."""


def _folded() -> LocalConvolution:
    def backward(
        dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not needs[1] or stride != 1 or len(weight) > FOLDED_CHANNELS or x_NCDHW.shape[4] % 2:
            return _backward(dy_NCDHW, x_NCDHW, weight, stride, needs)
        dx_NCDHW, _ = _backward(dy_NCDHW, x_NCDHW, weight, stride, (True, False)) if needs[0] else (None, None)
        return dx_NCDHW, folded_weight_gradient(dy_NCDHW, x_NCDHW, weight)

    return LocalConvolution(_forward, backward)


def _folded_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it is worth its while with cuDNN only, not on {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"measured with fp16 and bf16 only, not with {request.dtype}"
    return None


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _triton, _triton_unsupported),
    "folded": Implementation("folded", _folded, _folded_unsupported),
    "torch": Implementation("torch", _torch, always),
}
"""``function`` returns a :class:`LocalConvolution`. Triton's is for 1 input channel. ``folded`` and ``torch`` are of
cuDNN on a GPU; the former asks it for the weight's gradient in another way where there are few output channels."""

KERNEL_NAMES = (("convolution, either way", r"^single_channel_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
