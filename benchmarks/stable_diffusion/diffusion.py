"""The diffusion: its schedule, what the network predicts, what follows from a prediction, and the sampler's times.

With a = abar[t], the share of the signal's variance that is left at time t, and eps normal noise (Ho et al.,
arXiv:2006.11239, section 2; Salimans and Ho, arXiv:2202.00512, appendix D)::

    x_t = sqrt(a) z + sqrt(1 - a) eps          v  = sqrt(a) eps - sqrt(1 - a) z
    z   = sqrt(a) x_t - sqrt(1 - a) v          eps = sqrt(a) v + sqrt(1 - a) x_t

Functions take ``abar`` as a tensor that broadcasts with the others: (N, 1, 1, 1) where samples have times of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TIMES = 1000
FIRST_BETA, LAST_BETA = 0.00085, 0.012
"""Defaults of :func:`abar`: those of the model (its configuration says them again)."""


def abar(times: int = TIMES, first_beta: float = FIRST_BETA, last_beta: float = LAST_BETA) -> Tensor:
    """The signal's share of the variance at every time, float64 (times,): products of 1 - beta.

    The betas are squares of numbers at equal distances between the roots of the first and the last.

    Raises:
        ValueError: betas that are not between 0 and 1, or no times.
    """
    if times < 1 or not 0 < first_beta <= last_beta < 1:
        raise ValueError(f"{times} times with betas from {first_beta} to {last_beta}: 0 < first <= last < 1")
    roots_T = torch.linspace(first_beta**0.5, last_beta**0.5, times, dtype=torch.float64)
    return (1 - roots_T.square()).cumprod(0)


def diffused(z: Tensor, eps: Tensor, abar: Tensor) -> Tensor:
    """``x_t`` of a latent and noise."""
    return abar.sqrt() * z + (1 - abar).sqrt() * eps


def v_target(z: Tensor, eps: Tensor, abar: Tensor) -> Tensor:
    """What the network learns to predict from ``x_t``."""
    return abar.sqrt() * eps - (1 - abar).sqrt() * z


def x0_of(x_t: Tensor, v: Tensor, abar: Tensor) -> Tensor:
    """The latent that a prediction ``v`` at ``x_t`` means."""
    return abar.sqrt() * x_t - (1 - abar).sqrt() * v


def eps_of(x_t: Tensor, v: Tensor, abar: Tensor) -> Tensor:
    """The noise that a prediction ``v`` at ``x_t`` means."""
    return abar.sqrt() * v + (1 - abar).sqrt() * x_t


class SamplingTimes(NamedTuple):
    """The way down of a DDIM sampler (Song et al., arXiv:2010.02502), in the order in which it goes.

    Attributes:
        t_S: times, int64.
        abar_S: signal's share there, float64.
        previous_S: that of the time which a step leads to; the last step leads to time 0, where some noise is left.
    """

    t_S: Tensor
    abar_S: Tensor
    previous_S: Tensor


def sampling_times(abar_T: Tensor, steps: int) -> SamplingTimes:
    """Every (T / steps)-th time from 1 on, downward.

    Raises:
        ValueError: ``steps`` do not divide the times, or are so many that the last would be beyond the schedule.
    """
    times = len(abar_T)
    if steps < 1 or times % steps or times == steps:
        raise ValueError(f"{steps} steps of sampling: a divisor of the {times} times, and less")
    t_S = torch.arange(0, times, times // steps) + 1
    abar_S = abar_T[t_S]
    previous_S = torch.cat([abar_T[:1], abar_S[:-1]])
    return SamplingTimes(t_S.flip(0), abar_S.flip(0), previous_S.flip(0))
