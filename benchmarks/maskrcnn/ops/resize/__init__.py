"""Decoded pictures to a batch: resized, mirrored, blue first, less their mean, and zero beyond the picture.

Bilinear between the centres of pixels, and rounded to levels as Pillow rounds them: first along the width, then along
the height, with weights in units of 2**-22. A picture that is enlarged gets the levels that ``Image.resize`` gives it,
bit for bit. One that is made smaller does not: Pillow widens its filter then, which nothing here does, since no picture
of COCO is larger than it is resized to.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.maskrcnn.ops.resize.plain import resize_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _resize_triton(*args: Any, **kwargs: Any) -> Tensor:
    from benchmarks.maskrcnn.ops.resize.triton import resize  # triton is imported only where it is used

    return resize(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _resize_triton, triton_unsupported),
    "torch": Implementation("torch", resize_torch, always),
}
"""Signature: ``resize(pixels_BSS3, decoded_size_B2, size_B2, mirrored_B, mean, shape, dtype)``; a request's dtype is
that of the batch."""

KERNEL_NAMES = (("resize", r"^resize_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
