"""Reference of :mod:`common.ops.random_bits`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def words(index: Tensor, seed: Tensor, site: int | Tensor = 0) -> Tensor:
    """Return the hash of each index: int32 with the 32 bits of the hash, in the broadcast shape.

    Args:
        index: integers, 0 ... 2**32 - 1.
        seed: int64, on the device of ``index``; broadcasts with it.
        site: number of the caller's site, not negative; different sites have different bits. A tensor on the same
            device broadcasts too.
    """
    if isinstance(site, Tensor):
        number = (site.long() * 0x9E3779B9 + 1).to(torch.int32)
        site = site.to(torch.int32)
    else:
        number = torch.full((), _int32(site * 0x9E3779B9 + 1), dtype=torch.int32, device=seed.device)
    low, high = (seed & 0xFFFFFFFF).to(torch.int32), (seed >> 32).to(torch.int32)
    first = _mix(low ^ _mix(number))
    second = _mix(high + _mix(first ^ site))
    return _mix(_mix(index.to(torch.int32) ^ first) ^ second)


def normal_pairs(
    index: Tensor, seed: Tensor, site: int | Tensor = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return two independent normal numbers for every index, each in the broadcast shape.

    Args:
        index: integers, 0 ... 2**31 - 1.
        dtype: fp32, or fp64 for more digits of the same numbers.
    """
    dims = max(index.dim(), seed.dim(), site.dim() if isinstance(site, Tensor) else 0)
    both = torch.arange(2, device=index.device).view(2, *[1] * dims)
    for_radius, for_angle = _uniform(words(2 * index.long() + both, seed, site)).to(dtype)
    radius, angle = (-2 * for_radius.log()).sqrt(), 2 * math.pi * for_angle
    return radius * angle.cos(), radius * angle.sin()


def _uniform(bits: Tensor) -> Tensor:
    """Return numbers in (0, 1] computed from hashes, fp32."""
    return ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32


def _int32(word: int) -> int:
    """Return the int32 with the low 32 bits of ``word``."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix(x: Tensor) -> Tensor:
    """Return ``mix`` of words that are stored as int32.

    Products wrap around, and shifts are masked to remove the sign. On a CPU this is three times as fast as int64,
    which has no vector product there.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _int32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x
