"""The reference of :mod:`benchmarks.stable_diffusion.ops.noising`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.random_bits.reference import normal_pairs, words

SMALLEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE = -30.0, 20.0
TIME_INDEX = 0xFFFFFFFF
"""Index of the hash that gives a sample's time: beyond every element's."""


class Tables(NamedTuple):
    """What the schedule and the precision of a run give.

    Attributes:
        signal_T, noise_T: square roots of abar and of 1 - abar, fp32, or fp64 of fp64.
        latent_scale: factor of a latent.
        dtype: of ``x_t``.
    """

    signal_T: Tensor
    noise_T: Tensor
    latent_scale: float
    dtype: torch.dtype


class Noised(NamedTuple):
    """A micro-batch.

    Attributes:
        x_t_NCHW: noised latents, channels_last, in the dtype of the tables.
        target_NCHW: what the network learns to predict, channels_last, fp32 (fp64 of fp64).
        t_N: times, int64.
    """

    x_t_NCHW: Tensor
    target_NCHW: Tensor
    t_N: Tensor


def tables(abar_T: Tensor, latent_scale: float, dtype: torch.dtype, device: torch.device) -> Tables:
    """Tables of a schedule.

    Args:
        abar_T: the signal's share of the variance, float64.
        latent_scale: factor of a latent.
        dtype: that the network trains in.
        device: where.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    signal_T, noise_T = (root.sqrt().to(device, wide) for root in (abar_T, 1 - abar_T))
    return Tables(signal_T, noise_T, latent_scale, dtype)


def noised_reference(moments_N2CHW: Tensor, seed: Tensor, sample_ids_N: Tensor, tables: Tables) -> Noised:
    """Reference implementation.

    Args:
        moments_N2CHW: mean and log-variance of every latent, the means' channels first, fp32 or 16 bit, contiguous.
        seed: int64, 0-d, on the device.
        sample_ids_N: int64, 0 ... 2**32 - 1; each is a sample of its own.
        tables: of the schedule.

    Raises:
        ValueError: an odd number of channels, or not an id for every sample.
    """
    check(moments_N2CHW, sample_ids_N)
    mean_NCHW, log_variance_NCHW = moments_N2CHW.to(tables.signal_T.dtype).chunk(2, 1)
    site_N1 = sample_ids_N.unsqueeze(1)
    element = torch.arange(mean_NCHW[0].numel(), device=moments_N2CHW.device)
    n_NCHW, eps_NCHW = (
        normal.view(mean_NCHW.shape) for normal in normal_pairs(element, seed, site_N1, tables.signal_T.dtype)
    )
    last = torch.full((1,), TIME_INDEX, dtype=torch.int64, device=moments_N2CHW.device)
    t_N = (words(last, seed, site_N1).long().squeeze(1) & 0xFFFFFFFF) * len(tables.signal_T) >> 32

    deviation_NCHW = (0.5 * log_variance_NCHW.clamp(SMALLEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)).exp()
    z_NCHW = tables.latent_scale * (mean_NCHW + deviation_NCHW * n_NCHW)
    signal, noise = (table.index_select(0, t_N).view(-1, 1, 1, 1) for table in (tables.signal_T, tables.noise_T))
    x_t_NCHW = (signal * z_NCHW + noise * eps_NCHW).to(tables.dtype)
    target_NCHW = signal * eps_NCHW - noise * z_NCHW
    return Noised(
        x_t_NCHW.contiguous(memory_format=torch.channels_last),
        target_NCHW.contiguous(memory_format=torch.channels_last),
        t_N,
    )


def check(moments_N2CHW: Tensor, sample_ids_N: Tensor) -> None:
    """Refuse shapes that mean nothing.

    Raises:
        ValueError: not (N, 2C, H, W) moments with N ids.
    """
    shape = tuple(moments_N2CHW.shape)
    if len(shape) != 4 or shape[1] % 2 or sample_ids_N.shape != shape[:1]:
        raise ValueError(f"moments {shape} of samples {tuple(sample_ids_N.shape)}: (N, 2C, H, W) and (N,)")
