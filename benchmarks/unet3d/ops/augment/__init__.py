"""Training crops from cached volumes: crop, flip, brightness, noise, cast and layout in one pass.

The host draws a few numbers per sample (:class:`benchmarks.unet3d.crop.Draws`); the device reads and writes each
voxel of the crop once. A mirrored crop is read with negative steps, so crop and flip are one address::

    address(d, h, w) = start + d * step_d + h * step_h + w * step_w

Noise is a function of (noise seed of the sample, index of the voxel in the whole crop). So ranks that share a crop
make consistent slabs of it, and all implementations give the same noise.

Legend: N samples of the micro-batch; D H W axes of the crop. If crops are split, D is that of this rank's slab.
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
