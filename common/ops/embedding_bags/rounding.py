"""fp32 to fp16 by chance: up with the share of the way that a value has gone to the next one, so right on average.

An update that is much smaller than a row would be lost in rounding to the nearest (Gupta et al., arXiv:1502.02551). The
bits are those of :mod:`common.ops.random_bits`, with the row as site and the column as index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.random_bits.reference import words


def round_by_chance(x_SW: Tensor, seed: Tensor, row_S: Tensor) -> Tensor:
    """Round rows to fp16.

    Args:
        x_SW: fp32.
        seed: 0-d int64, another one for every update.
        row_S: the rows' numbers in the store.

    Returns:
        (S, W) fp16; values beyond the largest become infinite.
    """
    column_W = torch.arange(x_SW.shape[1], device=x_SW.device)
    bits_SW = words(column_W, seed, row_S.unsqueeze(1))
    chance_SW = ((bits_SW >> 8) & 0xFFFFFF).float() * 2.0**-24
    exponent_SW = (x_SW.view(torch.int32) >> 23) & 0xFF  # with a bias of 127
    step_SW = (exponent_SW - 10).clamp(min=127 - 24, max=254)  # of fp16's grid, whose finest is 2**-24
    scaled_SW = x_SW * ((254 - step_SW) << 23).view(torch.float32)
    below_SW = scaled_SW.floor()
    up_SW = chance_SW < scaled_SW - below_SW
    return ((below_SW + up_SW) * (step_SW << 23).view(torch.float32)).half()
