"""The diffusion process: its schedule, the inputs and the loss of a training step, and the times of the sampler.

With z the latent, eps normal noise, and a = abar[t] the fraction of the signal's variance that is left at time t (Ho
et al., arXiv:2006.11239, section 2; Salimans and Ho, arXiv:2202.00512, appendix D)::

    x_t = sqrt(a) z + sqrt(1 - a) eps          v  = sqrt(a) eps - sqrt(1 - a) z
    z   = sqrt(a) x_t - sqrt(1 - a) v          eps = sqrt(a) v + sqrt(1 - a) x_t

:func:`x0_of` and :func:`eps_of` take ``abar`` as a tensor that broadcasts with the others: (N, 1, 1, 1) if every
sample has another time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.random_bits.sample_noise import sample_normals, sample_words
from common.ops.triton_support import widen


def abar(times: int, first_beta: float, last_beta: float) -> Tensor:
    """Return the fraction of the signal's variance at every time, float64 (times,): products of 1 - beta.

    The square roots of the betas are equally spaced from that of ``first_beta`` to that of ``last_beta``.
    """
    roots_T = torch.linspace(first_beta**0.5, last_beta**0.5, times, dtype=torch.float64)
    return (1 - roots_T.square()).cumprod(0)


class Noised(NamedTuple):
    """The inputs and targets of a training step.

    Attributes:
        x_t_NCHW: noised latents, channels_last, in the dtype of the activations.
        v_NCHW: target of the network, the velocity; channels_last, fp32, or fp64 for fp64 moments.
        t_N: times, int64.
    """

    x_t_NCHW: Tensor
    v_NCHW: Tensor
    t_N: Tensor


def noised(
    moments_N2CHW: Tensor, seed: Tensor, sample_ids_N: Tensor, abar_T: Tensor, latent_scale: float, dtype: torch.dtype
) -> Noised:
    """Draw latents, times and noise, and mix latents and noise.

    ``z = latent_scale (mean + exp(clamp(logvar, -30, 20) / 2) n)`` and ``t = floor(T u)``. The normal n and eps and
    the uniform u are those of :mod:`common.ops.random_bits.sample_noise`: they do not depend on batch, rank or order.
    Element (c H + h) W + w of a latent is the index of its pair (n, eps).

    Args:
        moments_N2CHW: means, then log-variances, along the channels. The arithmetic and the velocity are in fp32,
            or in fp64 for fp64 moments.
        seed: int64, 0-d, on the device.
        sample_ids_N: int64, 0 ... 2**32 - 1.
        abar_T: result of :func:`abar`, on the device.
        dtype: dtype of ``x_t``.
    """
    moments_N2CHW = widen(moments_N2CHW)
    mean_NCHW, log_variance_NCHW = moments_N2CHW.chunk(2, 1)
    n_NCHW, eps_NCHW = sample_normals(mean_NCHW.shape, seed, sample_ids_N, moments_N2CHW.dtype)
    t_N = sample_words(seed, sample_ids_N) * len(abar_T) >> 32

    z_NCHW = latent_scale * (mean_NCHW + (0.5 * log_variance_NCHW.clamp(-30, 20)).exp() * n_NCHW)
    share = abar_T.index_select(0, t_N).view(-1, 1, 1, 1)
    signal, noise = (root.sqrt().to(moments_N2CHW.dtype) for root in (share, 1 - share))
    x_t_NCHW = (signal * z_NCHW + noise * eps_NCHW).to(dtype).contiguous(memory_format=torch.channels_last)
    v_NCHW = (signal * eps_NCHW - noise * z_NCHW).contiguous(memory_format=torch.channels_last)
    return Noised(x_t_NCHW, v_NCHW, t_N)


def velocity_loss(prediction_NCHW: Tensor, v_NCHW: Tensor) -> Tensor:
    """Return the mean squared error, 0-d, in the dtype of the target ``v_NCHW``."""
    # in fp32, so that the loss scale multiplies the gradient before it is rounded to 16 bit
    return F.mse_loss(prediction_NCHW.to(v_NCHW.dtype), v_NCHW)


def x0_of(x_t: Tensor, v: Tensor, abar: Tensor) -> Tensor:
    """Return the denoised latent, ``sqrt(abar) x_t - sqrt(1 - abar) v``, that follows from the velocity ``v``."""
    return abar.sqrt() * x_t - (1 - abar).sqrt() * v


def eps_of(x_t: Tensor, v: Tensor, abar: Tensor) -> Tensor:
    """Return the noise, ``sqrt(abar) v + sqrt(1 - abar) x_t``, that follows from the velocity ``v``."""
    return abar.sqrt() * v + (1 - abar).sqrt() * x_t


class SamplingTimes(NamedTuple):
    """The steps of a DDIM sampler (Song et al., arXiv:2010.02502), in the order of sampling.

    Attributes:
        t_S: time at the start of each step, int64, descending.
        abar_S: ``abar`` at that time, float64.
        previous_S: ``abar`` at the end of the step. The last step ends at time 0, where some noise is left.
    """

    t_S: Tensor
    abar_S: Tensor
    previous_S: Tensor


def sampling_times(abar_T: Tensor, steps: int) -> SamplingTimes:
    """Return every (T / steps)-th time, starting at 1, in descending order. ``steps`` divides T and is less."""
    t_S = torch.arange(0, len(abar_T), len(abar_T) // steps) + 1
    abar_S = abar_T[t_S]
    previous_S = torch.cat([abar_T[:1], abar_S[:-1]])
    return SamplingTimes(t_S.flip(0), abar_S.flip(0), previous_S.flip(0))
