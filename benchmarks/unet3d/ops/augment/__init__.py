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

from typing import Any

from torch import Tensor

from benchmarks.unet3d.ops.augment.plain import augment_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _augment_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from benchmarks.unet3d.ops.augment.triton import augment  # triton is imported only where it is used

    return augment(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _augment_triton, triton_unsupported),
    "torch": Implementation("torch", augment_torch, always),
}
"""Signature: ``augment(images, labels, addresses, intensities, slab, dtype)``."""

KERNEL_NAMES = (("augmentation", r"^augment_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
