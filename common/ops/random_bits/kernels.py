# mypy: allow-untyped-defs
"""The hash of :mod:`common.ops.random_bits` for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Return ``mix`` of x, a bijection of uint32 that changes about half of the bits if one bit changes (lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def site_keys(seed_ptr, site):
    """Return the two keys of a site for :func:`word`, each combined with its upper half (``k ^ (k >> 16)``).

    Args:
        seed_ptr: one int64, on the device.
        site: number of the site.
    """
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    number = site.to(tl.uint32)
    first = _mix(low ^ _mix(number * 0x9E3779B9 + 1))
    second = _mix(high + _mix(first ^ number))
    return first ^ (first >> 16), second ^ (second >> 16)


@triton.jit
def unfinished_word(index, first, second):
    """Return the hash of ``index`` (uint32) without its last step, v ^= v >> 16.

    The step ``v ^= v >> 16`` is linear and its own inverse. So the one at the end of the inner mix cancels the one at
    the start of the outer mix, if the keys are from :func:`site_keys`. This saves a third of the work.
    """
    index ^= (index >> 16) ^ first
    index *= 0x7FEB352D
    index ^= index >> 15
    index *= 0x846CA68B
    index ^= second
    index *= 0x7FEB352D
    index ^= index >> 15
    index *= 0x846CA68B
    return index


@triton.jit
def word(index, first, second):
    """Return the hash of ``index`` (uint32), with the keys of :func:`site_keys`."""
    bits = unfinished_word(index, first, second)
    return bits ^ (bits >> 16)


@triton.jit
def uniform(bits):
    """Return numbers in (0, 1] computed from hashes, with a single rounding to fp32."""
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32


@triton.jit
def normal_pair(index, first, second):
    """Return two independent normal numbers, fp32, for ``index`` (uint32, below 2**31), with keys of
    :func:`site_keys`.
    """
    radius = tl.sqrt_rn(-2.0 * tl.log(uniform(word(2 * index, first, second))))
    angle = 6.283185307179586 * uniform(word(2 * index + 1, first, second))
    return radius * tl.cos(angle), radius * tl.sin(angle)
