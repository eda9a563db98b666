"""Masks of detections as COCO's run-lengths of the published picture, without the picture: a virtual paste.

The rules' steps for one detection, in fp32 as the reference takes them: a border of one zero around the S x S
probabilities; the box grown about its middle by (S + 2) / S; its corners cut to integers, towards zero; the
probabilities resized to the box's width and height, x2 - x1 + 1 each and at least 1, bilinearly between half-pixel
centres; 1 where they exceed the threshold; and that laid onto a picture of zeros, what is outside of it cut off.

A run-length code counts alternating runs of zeros and ones, column after column, beginning with zeros. All that happens
in it happens in the box: a run ends where a pixel differs from the one before, which is found by looking at the pixels
of the box and at the one below each of its columns. Nothing else of the picture is visited, and no bitmap is stored.

Two passes: how many runs each detection has, and, when their sums say where, the places at which they end. So many
detections share one buffer, and the host waits once for its size.

No product is fused with a sum, so the reference and the Triton kernels agree bit for bit. PyTorch's resizing on CPUs
fuses products with sums where the CPU can, and differs in the last bit: pixels within 2e-7 of the threshold may fall on
the other side.
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
"""Functions of a :class:`Paste`:

``count_runs(masks, threshold)`` gives (D,) int32;
``write_ends(masks, threshold, first_D, ends_T)`` fills ``ends_T``, int32."""
