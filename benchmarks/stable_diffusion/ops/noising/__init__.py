"""From a picture's moments to what a training step sees: latent, time, noise, noised latent and target, in one pass.

    z = scale (mean + exp(clamp(logvar, -30, 20) / 2) n)      t = floor(T u)
    x_t = sqrt(abar[t]) z + sqrt(1 - abar[t]) eps              v = sqrt(abar[t]) eps - sqrt(1 - abar[t]) z

n and eps, normal, and u, uniform, are functions of (seed, sample, element) by the hash of
:mod:`common.ops.random_bits`, whose site is the sample's id: they depend on no batch, rank or order. Element
(c H + h) W + w of a latent is the index of the pair (n, eps); the hash of the last index, 2**32 - 1, gives u.
"""

from __future__ import annotations

from typing import Any

from benchmarks.stable_diffusion.ops.noising.plain import Noised, Tables, noised_torch, tables
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "KERNEL_NAMES", "Noised", "Tables", "tables"]


def _noised_triton(*args: Any, **kwargs: Any) -> Noised:
    # triton is imported only where it is used
    from benchmarks.stable_diffusion.ops.noising.triton import noised

    return noised(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _noised_triton, triton_unsupported),
    "torch": Implementation("torch", noised_torch, always),
}
"""Signature: ``noised(moments_N2CHW, seed, sample_ids_N, tables)``."""

KERNEL_NAMES = (("noise and loss", r"^noising_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
