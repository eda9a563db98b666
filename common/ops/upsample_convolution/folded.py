"""The upsampling convolution as one 2x2 convolution with a filter for every parity of row and column.

Padded by one, it has H + 1 by W + 1 places. Place (i, j) of parity (a, b) belongs to row 2 (i - a) + a of the result
and column 2 (j - b) + b; where that is outside, nobody asks for it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.upsample_convolution.taps import summed_taps

_FORMAT = torch.channels_last
_PARITIES = tuple(itertools.product((0, 1), (0, 1)))


def upsample_convolution_folded(x_NIHW: Tensor, weight_OI33: Tensor, bias_O: Tensor | None) -> Tensor:
    """See :func:`common.ops.upsample_convolution.reference.upsample_convolution_reference`.

    The result is channels_last.
    """
    filters = folded_taps(summed_taps(weight_OI33))
    y_NOHW: Tensor = _Dealt.apply(F.conv2d(x_NIHW, filters, padding=1), bias_O)
    return y_NOHW


def folded_taps(taps_IO44: Tensor) -> Tensor:
    """The same taps as filters (4 O, I, 2, 2), parity after parity: of parity a at row r it is tap 3 - a - 2 r."""
    split = taps_IO44.flip(2, 3).unflatten(3, (2, 2)).unflatten(2, (2, 2))
    return split.permute(3, 5, 1, 0, 2, 4).flatten(0, 2).contiguous(memory_format=_FORMAT)


class _Dealt(torch.autograd.Function):
    """Results of all parities (N, 4 O, H + 1, W + 1) to (N, O, 2H, 2W), with the bias."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias_O: Tensor | None) -> Tensor:
        pictures, filters, height, width = z.shape
        shape = pictures, filters // 4, 2 * (height - 1), 2 * (width - 1)
        y_NOHW = torch.empty(shape, dtype=z.dtype, device=z.device, memory_format=_FORMAT)
        ctx.biased = bias_O is not None
        for parity, (there, here) in zip(_PARITIES, _pairs(z, y_NOHW), strict=True):
            assert here.shape == there.shape, parity
            if bias_O is None:
                here.copy_(there)
            else:
                torch.add(there, bias_O.view(-1, 1, 1), out=here)
        return y_NOHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        dy_NOHW = gradients[0]
        pictures, channels, height, width = dy_NOHW.shape
        shape = pictures, 4 * channels, height // 2 + 1, width // 2 + 1
        dz = torch.empty(shape, dtype=dy_NOHW.dtype, device=dy_NOHW.device, memory_format=_FORMAT).zero_()
        for there, here in _pairs(dz, dy_NOHW):
            there.copy_(here)
        return dz, dy_NOHW.sum((0, 2, 3)) if ctx.biased else None


def _pairs(z: Tensor, y_NOHW: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of the same places in both, parity by parity."""
    height, width = (size // 2 for size in y_NOHW.shape[2:])
    return [
        (part[:, :, a : a + height, b : b + width], y_NOHW[:, :, a::2, b::2])
        for (a, b), part in zip(_PARITIES, z.chunk(4, 1), strict=True)
    ]
