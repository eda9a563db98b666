"""Weight gradient of layers with few channels, computed by a convolution of half the width and twice the channels."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.local_convolution import reference
from common.ops.local_convolution.reference import LocalConvolution
from common.ops.triton_support import widen


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
    _, dfolded = reference.backward(fold_width(dy_NCDHW), fold_width(x_NCDHW), folded, 1, (False, True))
    assert dfolded is not None
    wide = widen(dfolded).view(2, C_out, 2, C_in, 3, 3, 3)
    taps = [torch.stack([wide[p, :, q, ..., t] for p, q, t in combinations]).sum(0) for combinations in _FOLDED_TAPS]
    return torch.stack(taps, -1).to(weight.dtype)


_FOLDED_TAPS = [[(p, (p + k - 1) % 2, (p + k - 1) // 2 + 1) for p in range(2)] for k in range(3)]
"""Combinations (p, q, t) of each tap k; see :func:`folded_weight_gradient`."""
FOLDED_CHANNELS = 32
"""Largest number of output channels for which the weight gradient is folded."""


def folded_convolution() -> LocalConvolution:
    """Return the reference implementation, with the folded weight gradient where it applies."""

    def backward(
        dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not needs[1] or stride != 1 or len(weight) > FOLDED_CHANNELS or x_NCDHW.shape[4] % 2:
            return reference.backward(dy_NCDHW, x_NCDHW, weight, stride, needs)
        dx_NCDHW, _ = reference.backward(dy_NCDHW, x_NCDHW, weight, stride, (True, False)) if needs[0] else (None, None)
        return dx_NCDHW, folded_weight_gradient(dy_NCDHW, x_NCDHW, weight)

    return LocalConvolution(reference.forward, backward)
