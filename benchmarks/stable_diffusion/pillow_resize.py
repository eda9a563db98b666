"""Bicubic resizing of 8-bit pictures with the same result as Pillow, bit by bit, on any device.

Pillow (``Image.resize`` with ``BICUBIC``) weights neighbours by the cubic kernel of Keys (1981) with a = -1/2,
stretched for downscaling to prevent aliasing. Weights are rounded to multiples of 2**-22. Columns are resized first,
then rows, and both results are rounded to 8 bits. Here each pass is a matrix product in float64, where sums of such
integers are exact in any order, because 255 times the weights is far below 2**53.

The results are equal wherever pictures keep their proportions, as in CLIP. Where proportions change much, newer
releases of Pillow resize rows first if that is less work; older ones never do.

Legend: N pictures, C channels, H height, W width.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

PRECISION_BITS = 22
"""Fractional bits of a weight: 32 bits, minus 8 of a value, minus 2 for overshoot."""
SUPPORT = 2.0
"""Radius of the kernel in pixels, without downscaling."""


def resize_bicubic(pictures_NCHW: Tensor, height: int, width: int) -> Tensor:
    """Resize pictures.

    Args:
        pictures_NCHW: uint8.
        height, width: size of the result, px.

    Returns:
        (N, C, height, width) uint8.

    Raises:
        ValueError: another dtype, or a size below 1.
    """
    if pictures_NCHW.dtype != torch.uint8:
        raise ValueError(f"pictures in {pictures_NCHW.dtype}: uint8")
    if min(height, width) < 1:
        raise ValueError(f"a picture of {height} x {width} pixels")
    device, resized = pictures_NCHW.device, pictures_NCHW
    if width != pictures_NCHW.shape[3]:
        resized = _rounded(resized.double() @ _weights(pictures_NCHW.shape[3], width, device).T)
    if height != pictures_NCHW.shape[2]:
        resized = _rounded(_weights(pictures_NCHW.shape[2], height, device) @ resized.double())
    return resized


def _rounded(sums: Tensor) -> Tensor:
    """Round sums of weighted bytes to the nearest byte; halves round up."""
    half = 1 << (PRECISION_BITS - 1)
    return ((sums + half) * 2.0**-PRECISION_BITS).floor_().clamp_(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=16)
def _weights(before: int, after: int, device: torch.device) -> Tensor:
    """Return the weights as a float64 matrix (after, before) of integers."""
    rows = torch.zeros(after, before, dtype=torch.float64)
    scale = before / after
    stretch = max(scale, 1.0)
    for place in range(after):
        center = (place + 0.5) * scale
        first = max(int(center - SUPPORT * stretch + 0.5), 0)
        end = min(int(center + SUPPORT * stretch + 0.5), before)
        inverse = 1.0 / stretch
        taps = [_cubic((number - center + 0.5) * inverse) for number in range(first, end)]
        total = 0.0
        for tap in taps:  # in this order, as in Pillow: it affects the last bits
            total += tap
        for number, tap in enumerate(taps, first):
            value = tap / total * (1 << PRECISION_BITS)
            rows[place, number] = math.trunc(value + (0.5 if value >= 0 else -0.5))
    return rows.to(device)


def _cubic(x: float) -> float:
    """Return the value of Keys' kernel with a = -1/2."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < SUPPORT:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0
