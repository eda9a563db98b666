# mypy: allow-untyped-defs
"""The Triton kernel that noises latents: see :mod:`benchmarks.stable_diffusion.ops.noising`.

A program makes BLOCK neighbouring elements of one sample, in the order in which they are written, channels last; those
that it reads lie in as many rows as there are channels. Every program of a sample computes its time, one hash, and the
first one writes it down. At 32 samples of 4 x 64 x 64 it moves 7.3 MB (fp32 moments, 16-bit latents, fp32 target).
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import normal_pair, site_keys, word


@triton.jit
def noising_kernel(
    moments_ptr,  # (N, 2 CHANNELS, PLACES)
    seed_ptr,  # ()
    sample_ids_ptr,  # (N,)
    signal_ptr,  # (TIMES,) fp32
    noise_ptr,  # (TIMES,) fp32
    x_t_ptr,  # (N, PLACES, CHANNELS)
    target_ptr,  # (N, PLACES, CHANNELS) fp32
    t_ptr,  # (N,) int64
    latent_scale, least, most,  # least and most: bounds of the log-variance
    TIMES: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, TIME_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (PLACES CHANNELS / BLOCK, N)."""
    sample = tl.program_id(1).to(tl.int64)
    first, second = site_keys(seed_ptr, tl.load(sample_ids_ptr + sample))
    bits = word(tl.full((), TIME_INDEX, tl.uint32), first, second)
    t = (bits.to(tl.int64) * TIMES) >> 32
    if tl.program_id(0) == 0:
        tl.store(t_ptr + sample, t)
    signal = tl.load(signal_ptr + t)
    noise = tl.load(noise_ptr + t)

    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < PLACES * CHANNELS
    element = offset % CHANNELS * PLACES + offset // CHANNELS
    normal, eps = normal_pair(element.to(tl.uint32), first, second)
    own = moments_ptr + sample * (2 * CHANNELS * PLACES) + element
    mean = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    log_variance = tl.load(own + CHANNELS * PLACES, mask=inside, other=0.0).to(tl.float32)
    log_variance = tl.clamp(log_variance, least, most, propagate_nan=tl.PropagateNan.ALL)
    z = latent_scale * (mean + tl.exp(0.5 * log_variance) * normal)
    place = sample * (CHANNELS * PLACES) + offset
    tl.store(x_t_ptr + place, (signal * z + noise * eps).to(x_t_ptr.dtype.element_ty), mask=inside)
    tl.store(target_ptr + place, signal * eps - noise * z, mask=inside)
