"""Rectified flow (Liu et al., arXiv:2209.03003): latents, their packing, times, noise, and the loss of a step.

With z the latent, eps normal noise and t a time from 0 to 1::

    z   = scale (mean + exp(logvar / 2) n - shift)
    x_t = (1 - t) z + t eps
    v   = eps - z                 the velocity, which the network predicts

All random numbers are functions of a seed and of the number of the sample
(:mod:`common.ops.random_bits.sample_noise`), so they do not depend on batch, rank or order.

Legend: see :mod:`benchmarks.flux1.architecture`; A channels of a latent, H its height, W its width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.random_bits.sample_noise import sample_normals, sample_uniform
from common.ops.triton_support import widen


class Noised(NamedTuple):
    """Input and target of the network.

    Attributes:
        x_t_NLP: noised latents, packed, in the dtype of the activations.
        v_NLP: velocity, packed; fp32, or fp64 for fp64 latents.
        t_N: times; dtype of the velocity.
    """

    x_t_NLP: Tensor
    v_NLP: Tensor
    t_N: Tensor


class LatentScale(NamedTuple):
    """Shift and scale that give the latents of the autoencoder mean 0 and variance 1."""

    shift: float
    scale: float


def sample_latents(mean_NAHW: Tensor, logvar_NAHW: Tensor, normal_NAHW: Tensor, latents: LatentScale) -> Tensor:
    """Return z, (N, A, H, W), from means, log-variances and normal numbers of one dtype."""
    return latents.scale * (mean_NAHW + (0.5 * logvar_NAHW).exp() * normal_NAHW - latents.shift)


def pack(x_NAHW: Tensor, patch: int) -> Tensor:
    """Return tokens (N, L, P), row by row; their features are (channel, row of the patch, column of the patch)."""
    x = x_NAHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # N, A, rows, patch, columns, patch
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def noised(
    mean_NAHW: Tensor,
    logvar_NAHW: Tensor,
    seed: Tensor,
    sample_ids_N: Tensor,
    latents: LatentScale,
    patch: int,
    dtype: torch.dtype,
    t_N: Tensor | None = None,
) -> Noised:
    """Draw latents, noise and, if ``t_N`` is None, times from 0 to 1 with uniform density; return the mixture.

    The arithmetic and the velocity are in fp32, or in fp64 for fp64 latents.

    Args:
        seed: int64, 0-d, on the device.
        sample_ids_N: int64, 0 ... 2**32 - 1.
        dtype: dtype of ``x_t_NLP``.
    """
    mean_NAHW, logvar_NAHW = widen(mean_NAHW), widen(logvar_NAHW)
    compute_dtype = mean_NAHW.dtype
    normal_NAHW, eps_NAHW = sample_normals(mean_NAHW.shape, seed, sample_ids_N, compute_dtype)
    t_N = sample_uniform(seed, sample_ids_N, compute_dtype) if t_N is None else t_N.to(compute_dtype)
    z_NLP, eps_NLP = (pack(x, patch) for x in (sample_latents(mean_NAHW, logvar_NAHW, normal_NAHW, latents), eps_NAHW))
    t_N11 = t_N.view(-1, 1, 1)
    return Noised(((1 - t_N11) * z_NLP + t_N11 * eps_NLP).to(dtype), eps_NLP - z_NLP, t_N)


def sample_losses(prediction_NLP: Tensor, v_NLP: Tensor) -> Tensor:
    """Return the mean squared error of every sample, (N,), in the dtype of the velocity ``v_NLP``."""
    return F.mse_loss(prediction_NLP.to(v_NLP.dtype), v_NLP, reduction="none").mean((1, 2))
