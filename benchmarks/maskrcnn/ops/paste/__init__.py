"""Virtual paste: detection masks as COCO's run lengths in the published picture, without drawing the picture.

The steps of the rules for a detection, in fp32 as in the reference: Pad the S x S probabilities with a border of one
zero. Enlarge the box around its centre by (S + 2) / S. Truncate its corners to integers. Resize the probabilities to
the width and height of the box, which are x2 - x1 + 1 etc. and at least 1, bilinearly between half-pixel centres. Set
pixels above the threshold to 1. Place the result in a picture of zeros and clip it.

A run-length code counts alternating runs of zeros and ones, column by column, beginning with zeros. A run ends where a
pixel differs from the previous one. This can happen only at the pixels of the box and at the pixel below each of its
columns, so that no other pixel is visited, and no bitmap is stored.

The first pass counts the runs of each detection, and the second writes their ends at offsets that are sums of the
counts. So all detections share one buffer, and the host waits once, for its size.

Products and sums are not fused, so that the reference and the Triton kernels are bit-identical. PyTorch's resize on
CPUs fuses them if the CPU can and differs in the last bit: pixels within 2e-7 of the threshold can change.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.paste.masks import Paste
from benchmarks.maskrcnn.ops.paste.reference import count_runs_reference, write_ends_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

PASTE = Operation(
    "paste",
    Paste(count_runs_reference, write_ends_reference),
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.paste.triton"),
    },
    kernel_names=(("paste", r"^paste_"),),
    cases="benchmarks.maskrcnn.ops.paste.cases",
)
"""Functions of :class:`Paste`:

``count_runs(masks, threshold)`` returns (D,) int32;
``write_ends(masks, threshold, first_D, ends_T)`` fills ``ends_T``, int32.
"""
