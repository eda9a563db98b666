"""From cached volumes to training crops: cut, mirror, brightness, noise, cast and layout in one pass.

The host draws a handful of numbers for every sample (:class:`benchmarks.unet3d.crop.Draws`); the device reads each
voxel of the crop once, from where the numbers say, and writes it once. A mirrored crop is the same crop read backwards,
so that cutting and mirroring are one address::

    address(d, h, w) = start + d * step_d + h * step_h + w * step_w

Noise is a pure function of (the sample's noise seed, the voxel's index in the whole crop): ranks that share a crop each
make their slab of it, and all implementations make the same one.

Legend: N samples of the micro-batch; D H W axes of the crop, D of this rank's slab only where crops are split.
"""

from __future__ import annotations

from benchmarks.unet3d.ops.augment.reference import augment_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

AUGMENT = Operation(
    "augment",
    augment_reference,
    {
        "triton": triton_kernels("benchmarks.unet3d.ops.augment.triton:augment"),
    },
    kernel_names=(("augmentation", r"^augment_"),),
    cases="benchmarks.unet3d.ops.augment.cases",
)
"""Signature: ``augment(images, labels, addresses, intensities, slab, dtype)``."""
