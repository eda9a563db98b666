"""Pillow's bicubic resizing of 8-bit pictures, to the same bytes, on any device.

Pillow (``Image.resize`` with ``BICUBIC``) weighs neighbours by the cubic of Keys (1981) with a = -1/2, stretched where
a picture shrinks so that nothing aliases. Weights are rounded to multiples of 2**-22; columns are resized first, then
rows, and both results are rounded to 8 bits. Here each pass is a product with a matrix in float64, in which sums of
such integers are exact in any order: 255 times the weights stays far below 2**53.

The bytes are Pillow's wherever a picture keeps its proportions, as in all that CLIP sees. Where they change much, newer
releases take rows first if that is less work, and older ones never do.

Legend: N pictures, C channels, H height, W width.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

PRECISION_BITS = 22
"""Below the point of a weight: 32 bits less 8 of a value, less 2 for overshoot."""
SUPPORT = 2.0
"""Pixels on either side that a weight is not zero for, where nothing shrinks."""


def resize_bicubic(pictures_NCHW: Tensor, height: int, width: int) -> Tensor:
    """Pictures of another size.

    Args:
        pictures_NCHW: uint8.
        height, width: of the result.

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
    """The nearest bytes of sums of weighted bytes; halves go up."""
    half = 1 << (PRECISION_BITS - 1)
    return ((sums + half) * 2.0**-PRECISION_BITS).floor_().clamp_(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=16)
def _weights(before: int, after: int, device: torch.device) -> Tensor:
    """Matrix (after, before) of whole numbers, float64."""
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
        for tap in taps:  # one after another, as there: the sum decides the last bits
            total += tap
        for number, tap in enumerate(taps, first):
            value = tap / total * (1 << PRECISION_BITS)
            rows[place, number] = math.trunc(value + (0.5 if value >= 0 else -0.5))
    return rows.to(device)


def _cubic(x: float) -> float:
    """Keys' kernel with a = -1/2."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < SUPPORT:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0
