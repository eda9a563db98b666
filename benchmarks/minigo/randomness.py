"""Random numbers of compiled code: every game has its own stream (SplitMix64).

A game then depends only on its seed and number, not on the other games of its worker.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import compiled

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled
def mixed(bits: np.uint64) -> np.uint64:
    """Return a hash of 64 bits, SplitMix64's output function."""
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))


@compiled
def uniform(stream: NDArray[np.uint64]) -> float:
    """Return a number in [0, 1) with 53 random bits, and advance the stream (1,)."""
    stream[0] += _STEP
    return np.float64(mixed(stream[0]) >> np.uint64(11)) * 2.0**-53


@compiled
def _normal(stream: NDArray[np.uint64]) -> float:
    """Return a sample of the standard normal distribution (Box and Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(stream)))
    return radius * math.cos(2.0 * math.pi * uniform(stream))


@compiled
def log_gamma_sample(stream: NDArray[np.uint64], alpha: float) -> float:
    """Return the logarithm of a sample of the gamma distribution with shape ``alpha``.

    It is Marsaglia and Tsang's method for shape alpha + 1, and a factor u**(1 / alpha). The logarithm is needed because
    samples of small shapes underflow.
    """
    d = alpha + 2.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = _normal(stream)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and math.log(1.0 - uniform(stream)) < 0.5 * x * x + d - d * v + d * math.log(v):
            return math.log(d * v) + math.log(1.0 - uniform(stream)) / alpha


@compiled
def write_dirichlet(stream: NDArray[np.uint64], alpha: float, noise: NDArray[np.float64]) -> None:
    """Fill ``noise`` with a sample of a symmetric Dirichlet distribution times a factor: the largest entry is 1."""
    largest = -np.inf
    for i in range(noise.size):
        noise[i] = log_gamma_sample(stream, alpha)
        largest = max(largest, noise[i])
    for i in range(noise.size):
        noise[i] = math.exp(noise[i] - largest)
