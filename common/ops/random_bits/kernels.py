# mypy: allow-untyped-defs
"""The hash of :mod:`common.ops.random_bits` for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """A bijection of uint32 that spreads every bit (the constants are those of lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def site_keys(seed_ptr, site):
    """The two words that the hash of a site takes: first and second, each mixed with its upper half.

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
    """The hash of ``index`` (uint32) but for its last step, v ^= v >> 16.

    ``v ^= v >> 16`` is linear and its own inverse. The one that ends the inner mix therefore cancels the one that
    starts the outer mix, if the keys are taken as :func:`site_keys` returns them: a third less to compute.
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
    """The hash of ``index`` (uint32), with the keys of :func:`site_keys`."""
    bits = unfinished_word(index, first, second)
    return bits ^ (bits >> 16)


@triton.jit
def uniform(bits):
    """Numbers in (0, 1] of hashes: exact steps but for one rounding to fp32."""
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32


@triton.jit
def normal_pair(index, first, second):
    """Two independent normal numbers, fp32, of ``index`` (uint32, below 2**31), with the keys of :func:`site_keys`."""
    radius = tl.sqrt_rn(-2.0 * tl.log(uniform(word(2 * index, first, second))))
    angle = 6.283185307179586 * uniform(word(2 * index + 1, first, second))
    return radius * tl.cos(angle), radius * tl.sin(angle)
