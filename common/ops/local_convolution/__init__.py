"""Convolution of one slab of a volume with a 3x3x3 kernel without bias, and its gradients.

The slab is padded with one plane of zeros on every side. :mod:`common.distributed.spatial.convolution` uses it to
convolve a volume that is split over ranks. On a GPU the reference is cuDNN's convolution.
Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported, widen


class LocalConvolution(NamedTuple):
    """Functions of an implementation, without autograd.

    Attributes:
        forward: maps (x_NCDHW, weight (C out, C in, 3, 3, 3), stride) to y_NCDHW.
        backward: maps (dy_NCDHW, x_NCDHW, weight, stride, needs) to the gradients of x and of the weight. ``needs``
            says which of the two are needed; the others are None.
    """

    forward: Callable[[Tensor, Tensor, int], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, int, tuple[bool, bool]], tuple[Tensor | None, Tensor | None]]


def forward_reference(x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the convolution, (N, C out, D', H', W'), with one zero of padding on each side."""
    return F.conv3d(x_NCDHW, weight, stride=stride, padding=1)


def backward_reference(
    dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight; None for a gradient that is not needed."""
    dx_NCDHW, dweight, _ = torch.ops.aten.convolution_backward(
        dy_NCDHW, x_NCDHW, weight, None, [stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [*needs, False]
    )
    return dx_NCDHW, dweight


def fold_width(x_NCDHW: Tensor) -> Tensor:
    """Return x with pairs of neighbours along W as one voxel of twice the channels, a view of channels_last_3d memory.

    W must be even.
    """
    N, C, D, H, W = x_NCDHW.shape
    return x_NCDHW.permute(0, 2, 3, 4, 1).reshape(N, D, H, W // 2, 2 * C).permute(0, 4, 1, 2, 3)


def folded_weight_gradient(dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor) -> Tensor:
    """Return the weight gradient for stride 1, computed by a convolution of half the width and twice the channels.

    The pair of outputs 2j, 2j + 1 depends on the pairs of inputs j - 1, j, j + 1. Tap k of the kernel connects output
    2j + p with input 2j + p + k - 1. This is element q of pair j + t - 1 if 2 (t - 1) + q = p + k - 1. So every tap
    appears in two of the twelve combinations of p, q and t; the other six are not used.

    So cuDNN computes twice as much, but with kernels for 64 channels, which use the tensor cores more than twice as
    well as those for 32. On an H200 (7 volumes of 128^3, bf16, cuDNN 9.19) 32 -> 32 channels take 3.53 ms instead of
    5.04, 64 -> 32 take 5.28 instead of 7.17. Folding the forward pass or the input gradient saves less than a tenth.
    """
    C_out, C_in = weight.shape[:2]
    folded = weight.new_empty((2 * C_out, 2 * C_in, 3, 3, 3)).to(memory_format=torch.channels_last_3d)
    _, dfolded = backward_reference(fold_width(dy_NCDHW), fold_width(x_NCDHW), folded, 1, (False, True))
    assert dfolded is not None
    widened = widen(dfolded).view(2, C_out, 2, C_in, 3, 3, 3)
    taps = [torch.stack([widened[p, :, q, ..., t] for p, q, t in combinations]).sum(0) for combinations in _FOLDED_TAPS]
    return torch.stack(taps, -1).to(weight.dtype)


_FOLDED_TAPS = [[(p, (p + k - 1) % 2, (p + k - 1) // 2 + 1) for p in range(2)] for k in range(3)]
"""Combinations (p, q, t) of each tap k; see :func:`folded_weight_gradient`."""
FOLDED_CHANNELS = 32
"""Largest number of output channels for which the weight gradient is folded."""


def folded_backward(
    dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight, the latter folded for stride 1, even W and few filters."""
    if not needs[1] or stride != 1 or len(weight) > FOLDED_CHANNELS or x_NCDHW.shape[4] % 2:
        return backward_reference(dy_NCDHW, x_NCDHW, weight, stride, needs)
    dx_NCDHW, _ = backward_reference(dy_NCDHW, x_NCDHW, weight, stride, (True, False)) if needs[0] else (None, None)
    return dx_NCDHW, folded_weight_gradient(dy_NCDHW, x_NCDHW, weight)


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.sizes["channels"] != 1:
        return f"the kernels take 1 input channel, not {request.sizes['channels']}"
    return triton_unsupported(request)


def _folded_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"folding is faster only with cuDNN, not on {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"measured with fp16 and bf16 only, not with {request.dtype}"
    return None


LOCAL_CONVOLUTION = Operation(
    "local_convolution",
    LocalConvolution(forward_reference, backward_reference),
    {
        "triton": Implementation("common.ops.local_convolution.triton", _triton_unsupported),
        "folded": Implementation(LocalConvolution(forward_reference, folded_backward), _folded_unsupported),
    },
    kernel_names=(("convolution, either way", r"^single_channel_"),),
    cases="common.ops.local_convolution.cases",
)
"""Functions: :class:`LocalConvolution`. Size of a request: ``channels`` of the input. ``triton`` supports 1 channel."""
