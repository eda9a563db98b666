"""The plain version of :mod:`common.ops.random_bits`."""

from __future__ import annotations

import torch
from torch import Tensor


def words(index: Tensor, seed: Tensor, site: int | Tensor = 0) -> Tensor:
    """``hash(index)``.

    Args:
        index: integers, 0 ... 2**32 - 1.
        seed: int64, on the device of ``index``; its shape and that of ``index`` broadcast.
        site: number of the place that asks, not negative; each has bits of its own. A tensor of them, on the same
            device, broadcasts too.

    Returns:
        int32 with the 32 bits of the hash, of the shape that all broadcast to.
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


def _int32(word: int) -> int:
    """The int32 with the low 32 bits of ``word``."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix(x: Tensor) -> Tensor:
    """``mix`` of words in int32, whose products wrap and whose shifts need the sign cut off.

    Three times as fast on a CPU as int64, which has no vector product there.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _int32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x
