"""Decoded pictures to a batch: resized, mirrored, blue first, less their mean, and zero beyond the picture.

Bilinear between the centres of pixels, and rounded to levels as Pillow rounds them: first along the width, then along
the height, with weights in units of 2**-22. A picture that is enlarged gets the levels that ``Image.resize`` gives it,
bit for bit. One that is made smaller does not: Pillow widens its filter then, which nothing here does, since no picture
of COCO is larger than it is resized to.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.resize.reference import resize_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

RESIZE = Operation(
    "resize",
    resize_reference,
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.resize.triton:resize"),
    },
    kernel_names=(("resize", r"^resize_"),),
    cases="benchmarks.maskrcnn.ops.resize.cases",
)
"""Signature: ``resize(pixels_BSS3, decoded_size_B2, size_B2, mirrored_B, mean, shape, dtype)``; a request's dtype is
that of the batch."""
