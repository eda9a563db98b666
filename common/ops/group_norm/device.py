# mypy: allow-untyped-defs
"""Functions that the Triton kernels of group norm share: the activation, and loading of statistics."""

from __future__ import annotations

import triton
import triton.language as tl

_MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(z * _MINUS_LOG2_E))


@triton.jit
def activated(z, SILU: tl.constexpr):
    """Return SiLU of z, ``z * sigmoid(z)``, or z itself without SILU."""
    if SILU:
        return z * _sigmoid(z)
    else:
        return z


@triton.jit
def before_activation(dy, z, SILU: tl.constexpr):
    """Return the gradient of z from the gradient of ``activated(z)``."""
    if SILU:
        sigmoid = _sigmoid(z)
        return dy * sigmoid * (1.0 + z * (1.0 - sigmoid))
    else:
        return dy


@triton.jit
def load_statistics(
    statistics_ptr, added_ptr, channel, inside, sample, samples, C, G, WIDTH: tl.constexpr, ADDED: tl.constexpr
):
    """Return mean(x + added) - added, which centres x, and 1 / standard deviation, for channels of a sample."""
    group = channel // WIDTH
    centre = tl.load(statistics_ptr + sample * G + group, mask=inside, other=0.0)
    rstd = tl.load(statistics_ptr + (samples + sample) * G + group, mask=inside, other=0.0)
    if ADDED:
        centre -= tl.load(added_ptr + sample * C + channel, mask=inside, other=0.0).to(tl.float32)
    return centre, rstd
