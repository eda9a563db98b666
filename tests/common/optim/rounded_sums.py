"""Bounds of the difference between two runs whose ranks sum gradients in another order, in the gradients' dtype.

One rounding: a number m * 2^e with 1 <= m < 2 has neighbours at a distance of s * 2^e, where s is ``torch.finfo.eps``.
The rounding error is uniform between them: at most s / sqrt(12) of the number in the root mean square.

A sum over n ranks: a ring rounds after each of n - 1 additions. The partial sum of k independent gradients has k/n of
the variance of the whole, so the error is sqrt(2/n + 3/n + ... + n/n) roundings: 1 for two ranks, 1.5 for four, 2.1 for
eight. Sums of pairs of pairs have a smaller error; a switch that adds in fp32 rounds once. Two numbers have the same
sum in any order.

Directions of LAMB and Adam: in the first update, u = m / sqrt(v) is the sign of the gradient. For normal gradients, an
error of e deviations flips a fraction of arctan(e) / pi = e / pi of the signs, and each changes u by 2. So u and u'
differ by 2 * sqrt(e / pi) of their norm: 20 times e, for an e of 0.3 %.

Weights: an update moves a tensor by rate * |w| with a trust ratio, and by rate * |u| without one, where |u| is about
the square root of the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of one rounding, in the root mean square."""
    return torch.finfo(dtype).eps / math.sqrt(12)


def error_of_a_sum(dtype: torch.dtype, ranks: int) -> float:
    """Return the relative error of a ring's sum of independent gradients of ``ranks`` ranks."""
    return rounding(dtype) * math.sqrt(sum(k / ranks for k in range(2, ranks + 1)))


def difference_of_directions(dtype: torch.dtype, ranks: int) -> float:
    """Return the relative difference of LAMB's directions for two independently rounded sums over ``ranks``."""
    if ranks <= 2:
        return 0.0
    return 2 * math.sqrt(math.sqrt(2) * error_of_a_sum(dtype, ranks) / math.pi)


def difference_of_weights(
    dtype: torch.dtype, ranks: int, rates: Sequence[float], norm: float, elements: int, trust_ratio: bool
) -> float:
    """Return the norm of the difference after LAMB's updates of a tensor of norm ``norm`` at ``rates``."""
    reach = norm if trust_ratio else math.sqrt(elements)
    return sum(rates) * difference_of_directions(dtype, ranks) * reach
