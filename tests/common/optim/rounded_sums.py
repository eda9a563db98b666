"""How far apart two runs may end that sum their ranks' gradients in another order, in the dtype of the gradients.

One rounding. A number m * 2^e with 1 <= m < 2 has neighbours at a distance of s * 2^e, s being ``torch.finfo.eps``, and
its rounding error is uniform between them: s / sqrt(12) of it in the root mean square, or less.

A sum over n ranks. A ring rounds after each of its n - 1 additions. The partial sum of k independent gradients has k/n
of the whole one's variance, hence an error of sqrt(2/n + 3/n + ... + n/n) roundings: 1 for two ranks, 1.5 for four, 2.1
for eight. Rounding pairs of pairs costs less, a sum in a switch that adds in float32 costs 1. Sums of two numbers are
the same in any order.

Directions of LAMB and Adam. In the first update u = m / sqrt(v) is the sign of the gradient, whatever its size. Where
gradients are normal, an error of e times their deviation turns the sign of a share of arctan(e) / pi = e / pi of them,
and each of these moves u by 2: u and u' differ by 2 * sqrt(e / pi) of their norm. That is 20 times an e of 0.3 %.

Weights. With a trust ratio an update moves a tensor by rate * |w|, and without one by rate * |u|, where |u| is about
the square root of the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def rounding(dtype: torch.dtype) -> float:
    """Error of one rounding, relative, in the root mean square."""
    return torch.finfo(dtype).eps / math.sqrt(12)


def error_of_a_sum(dtype: torch.dtype, ranks: int) -> float:
    """Error of a ring's sum over ``ranks`` of independent gradients, relative to the sum."""
    return rounding(dtype) * math.sqrt(sum(k / ranks for k in range(2, ranks + 1)))


def difference_of_directions(dtype: torch.dtype, ranks: int) -> float:
    """Between LAMB's directions for two sums over ``ranks`` that are rounded independently, relative to their norm."""
    if ranks <= 2:
        return 0.0
    return 2 * math.sqrt(math.sqrt(2) * error_of_a_sum(dtype, ranks) / math.pi)


def difference_of_weights(
    dtype: torch.dtype, ranks: int, rates: Sequence[float], norm: float, elements: int, trust_ratio: bool
) -> float:
    """Norm of the difference of a tensor after LAMB's updates at ``rates``, whose own norm is ``norm``."""
    reach = norm if trust_ratio else math.sqrt(elements)
    return sum(rates) * difference_of_directions(dtype, ranks) * reach
