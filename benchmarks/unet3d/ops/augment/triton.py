"""Training crops with the Triton kernel of :mod:`benchmarks.unet3d.ops.augment.kernels`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.unet3d.crop import Slab
from benchmarks.unet3d.ops.augment.kernels import augment_kernel
from common.ops.triton_support import require_contiguous

BLOCK = 1024
WARPS = 4


def augment(
    images: Tensor, labels: Tensor, addresses: Tensor, intensities: Tensor, slab: Slab, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`benchmarks.unet3d.ops.augment.reference.augment_reference`. It does not wait for the device."""
    require_contiguous(images=images, labels=labels, addresses=addresses, intensities=intensities)
    count = len(addresses)
    image = images.new_empty((count, *slab.shape, 1), dtype=dtype)
    label = labels.new_empty((count, *slab.shape))
    augment_kernel[(triton.cdiv(slab.voxels, BLOCK), count)](
        images, labels, addresses, intensities, image, label, slab.first_voxel, slab.voxels, 0,
        H=slab.size[1], W=slab.size[2], BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return image.permute(0, 4, 1, 2, 3), label
