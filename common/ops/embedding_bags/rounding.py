"""Stochastic rounding from fp32 to fp16: the distance to the lower neighbour is the probability of rounding up.

The result is correct on average, whereas rounding to nearest would lose updates that are much smaller than a row (Gupta
et al., arXiv:1502.02551). Bits come from :mod:`common.ops.random_bits`, with the row as site and the column as index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.random_bits.reference import words


def round_by_chance(x_SW: Tensor, seed: Tensor, row_S: Tensor) -> Tensor:
    """Round rows stochastically to fp16; values above the largest fp16 number become infinite.

    Args:
        x_SW: fp32.
        seed: 0-d int64, different for every update.
        row_S: indices of the rows in the store.
    """
    column_W = torch.arange(x_SW.shape[1], device=x_SW.device)
    bits_SW = words(column_W, seed, row_S.unsqueeze(1))
    chance_SW = ((bits_SW >> 8) & 0xFFFFFF).float() * 2.0**-24
    exponent_SW = (x_SW.view(torch.int32) >> 23) & 0xFF  # with a bias of 127
    step_SW = (exponent_SW - 10).clamp(min=127 - 24, max=254)  # spacing of fp16, at least 2**-24
    scaled_SW = x_SW * ((254 - step_SW) << 23).view(torch.float32)
    below_SW = scaled_SW.floor()
    up_SW = chance_SW < scaled_SW - below_SW
    return ((below_SW + up_SW) * (step_SW << 23).view(torch.float32)).half()
