"""The CLIP score: cosine of the embeddings of a picture and its caption (Hessel et al. 2021, without their factor).

Pictures are preprocessed by OpenCLIP's evaluation transform for 8-bit pictures: bicubic resizing of the short side,
central square crop, normalisation with the statistics of CLIP's training set.

The resizing has the same result as Pillow's ``Image.resize`` with ``BICUBIC``, bit by bit, on any device. Pillow
weights neighbours by the cubic kernel of Keys (1981) with a = -1/2, stretched for downscaling to prevent aliasing.
Weights are rounded to multiples of 2**-22. Columns are resized first, then rows, and both results are rounded to 8
bits. Here each pass is a matrix product in float64, where sums of such integers are exact in any order, because 255
times the weights is far below 2**53. If proportions change much, as CLIP never does, newer releases of Pillow may
resize rows first.

Legend: N pictures, C channels, H height, W width, E features of an embedding.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of red, green and blue in CLIP's training set (constants of OpenCLIP)."""


PRECISION_BITS = 22
"""Fractional bits of a weight: 32 bits, minus 8 of a value, minus 2 for overshoot."""
SUPPORT = 2.0
"""Radius of the kernel in pixels, without downscaling."""


def resize_bicubic(pictures_NCHW: Tensor, height: int, width: int) -> Tensor:
    """Return the uint8 pictures resized, (N, C, height, width)."""
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
    for position in range(after):
        center = (position + 0.5) * scale
        first = max(int(center - SUPPORT * stretch + 0.5), 0)
        end = min(int(center + SUPPORT * stretch + 0.5), before)
        inverse = 1.0 / stretch
        taps = [_cubic((number - center + 0.5) * inverse) for number in range(first, end)]
        total = 0.0
        for tap in taps:  # in this order, as in Pillow: it affects the last bits
            total += tap
        for number, tap in enumerate(taps, first):
            value = tap / total * (1 << PRECISION_BITS)
            rows[position, number] = math.trunc(value + (0.5 if value >= 0 else -0.5))
    return rows.to(device)


def _cubic(x: float) -> float:
    """Return the value of Keys' kernel with a = -1/2."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < SUPPORT:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0


def to_bytes(images_N3HW: Tensor) -> Tensor:
    """Convert pictures in [0, 1] to uint8 as the reference does: 255 times the value, truncated."""
    return (255 * images_N3HW).to(torch.uint8)


class ClipTransform:
    """Preprocessing of 8-bit pictures for CLIP's vision tower.

    Args:
        resolution: height and width of the result, px.
    """

    def __init__(self, resolution: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._resolution, self._dtype = resolution, dtype
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        self._mean_311, self._deviation_311 = (
            torch.tensor(values, dtype=at_least_fp32, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION)
        )

    def __call__(self, pictures_N3HW: Tensor) -> Tensor:
        """Map uint8 pictures of any size to normalised ones (N, 3, resolution, resolution) in ``dtype``."""
        height, width = pictures_N3HW.shape[2:]
        short, target = min(height, width), self._resolution
        resized = resize_bicubic(pictures_N3HW, target * height // short, target * width // short)
        top, left = (round((size - target) / 2) for size in resized.shape[2:])
        square = resized[:, :, top : top + target, left : left + target]
        pixels = square.to(self._mean_311.dtype) / 255
        return ((pixels - self._mean_311) / self._deviation_311).to(self._dtype)


def cosines(pictures_NE: Tensor, captions_NE: Tensor) -> Tensor:
    """Return the cosine of every picture with its caption: (N,) fp32, or fp64 for fp64. Normalises its inputs."""
    dtype = torch.promote_types(torch.promote_types(pictures_NE.dtype, captions_NE.dtype), torch.float32)
    pictures, captions = (F.normalize(embeddings.to(dtype), dim=1) for embeddings in (pictures_NE, captions_NE))
    return (pictures * captions).sum(1)
