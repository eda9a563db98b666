"""Resize decoded pictures to a batch: mirrored, blue first, minus the mean, and zero outside the pictures.

Resizing is bilinear between pixel centres, first along the width, then along the height, with weights in units of
2**-22 and Pillow's rounding to levels. For enlarged pictures, the levels are bit-identical to ``Image.resize``. For
reduced pictures they are not, because Pillow then widens its filter. This is not implemented, since no picture of COCO
is reduced.
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
"""Signature: ``resize(pixels_BSS3, decoded_size_B2, size_B2, mirrored_B, mean, shape, dtype)``.

The dtype of a request is that of the batch.
"""
