"""Noising by its definition in float64 with NumPy: the hash in unsigned arithmetic, Box and Muller, the formulas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import abar

LATENT_SCALE = 0.18215


class Oracle(NamedTuple):
    """What is expected, float64 but for the times."""

    n: np.ndarray
    eps: np.ndarray
    x_t: np.ndarray
    target: np.ndarray
    t: np.ndarray


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hashed(index: np.ndarray, seed: int, site: int) -> np.ndarray:
    low, high = (np.array([part], np.uint32) for part in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    first = mix(low ^ mix(np.array([(site * 0x9E3779B9 + 1) & 0xFFFFFFFF], np.uint32)))
    second = mix(high + mix(first ^ np.uint32(site)))
    return mix(mix(index.astype(np.uint32) ^ first) ^ second)


def uniform(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32


def expected(moments: Tensor, seed: int, sample_ids: list[int], times: int = 1000) -> Oracle:
    values = moments.double().numpy()
    samples, channels = values.shape[0], values.shape[1] // 2
    mean, log_variance = values[:, :channels], values[:, channels:]
    index = np.arange(mean[0].size)
    n, eps, t = [], [], []
    for site in sample_ids:
        radius = np.sqrt(-2 * np.log(uniform(hashed(2 * index, seed, site))))
        angle = 2 * np.pi * uniform(hashed(2 * index + 1, seed, site))
        n.append((radius * np.cos(angle)).reshape(mean.shape[1:]))
        eps.append((radius * np.sin(angle)).reshape(mean.shape[1:]))
        t.append(int(hashed(np.array([2**32 - 1]), seed, site)[0]) * times >> 32)
    n, eps, t = np.stack(n), np.stack(eps), np.array(t)
    z = LATENT_SCALE * (mean + np.exp(0.5 * np.clip(log_variance, -30, 20)) * n)
    share = abar(times).numpy()[t].reshape(samples, 1, 1, 1)
    return Oracle(
        n, eps, np.sqrt(share) * z + np.sqrt(1 - share) * eps, np.sqrt(share) * eps - np.sqrt(1 - share) * z, t
    )


def moments(samples: int, channels: int, height: int, width: int) -> Tensor:
    """Means of a standard deviation of 5; log-variances from -15 to -5, and some beyond their bounds."""
    random = torch.Generator().manual_seed(samples)
    found = torch.randn(samples, 2 * channels, height, width, generator=random) * 5
    found[:, channels:] = found[:, channels:] - 10
    found[0, channels, 0, 0], found[-1, -1, -1, -1] = -100.0, 25.0
    return found
