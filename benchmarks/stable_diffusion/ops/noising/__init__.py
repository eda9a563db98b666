"""From a picture's moments to what a training step sees: latent, time, noise, noised latent and target, in one pass.

    z = scale (mean + exp(clamp(logvar, -30, 20) / 2) n)      t = floor(T u)
    x_t = sqrt(abar[t]) z + sqrt(1 - abar[t]) eps              v = sqrt(abar[t]) eps - sqrt(1 - abar[t]) z

n and eps, normal, and u, uniform, are functions of (seed, sample, element) by the hash of
:mod:`common.ops.random_bits`, whose site is the sample's id: they depend on no batch, rank or order. Element
(c H + h) W + w of a latent is the index of the pair (n, eps); the hash of the last index, 2**32 - 1, gives u.
"""

from __future__ import annotations

from benchmarks.stable_diffusion.ops.noising.reference import Noised, Tables, noised_reference, tables
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["NOISING", "Noised", "Tables", "tables"]


NOISING = Operation(
    "noising",
    noised_reference,
    {
        "triton": triton_kernels("benchmarks.stable_diffusion.ops.noising.triton:noised"),
    },
    kernel_names=(("noise and loss", r"^noising_"),),
    cases="benchmarks.stable_diffusion.ops.noising.cases",
)
"""Signature: ``noised(moments_N2CHW, seed, sample_ids_N, tables)``."""
