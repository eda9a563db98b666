"""The reference of :mod:`benchmarks.rnnt.ops.joined_dropout`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.dropout.reference import dropout_reference

JOINED = 2
"""Frames that become one."""


def joined_dropout_reference(x_TBH: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """Drop elements by their flat index in ``x_TBH``, then join frames.

    Args:
        x_TBH: contiguous.
        p: probability; with 0 the seed is not read.
        seed: 0-d int64 on the device.
        site: number of the call site.

    Returns:
        (S, B, 2 H).
    """
    frames, batch, width = x_TBH.shape
    y_TBH = dropout_reference(x_TBH, p, seed, site)
    if frames % JOINED:
        y_TBH = F.pad(y_TBH, (0, 0, 0, 0, 0, 1))
    return y_TBH.view(-1, JOINED, batch, width).transpose(1, 2).reshape(-1, batch, JOINED * width)
