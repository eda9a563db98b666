# mypy: allow-untyped-defs
"""The Triton kernel that makes training crops, see :mod:`benchmarks.unet3d.ops.augment`.

A program makes ``BLOCK`` adjacent voxels of one sample. With an fp32 cache and bf16 crops it moves 8 bytes per voxel:
117 MB for seven crops of 128x128x128 voxels. Noise takes two hashes, a logarithm, a square root and a cosine per
voxel; only samples with noise compute it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.unet3d.crop import Slab
from common.ops.random_bits.kernels import site_keys, word
from common.ops.triton_support import require_contiguous


@triton.jit
def _uniform(index, first, second):
    """Return uniform numbers of 23 bits, strictly between 0 and 1."""
    return ((word(index, first, second) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def _normal(index, first, second):
    """Return normal numbers by Box and Muller: the cosine for even voxels, the sine for odd ones."""
    even = index & 0xFFFFFFFE
    radius = tl.sqrt(-2.0 * tl.log(_uniform(even, first, second)))
    turn = _uniform(even + 1, first, second) - 0.25 * (index & 1).to(tl.float32)
    return radius * tl.cos(6.283185307179586 * turn)


@triton.jit(do_not_specialize=["site"])
def augment_kernel(
    images_ptr,  # (voxels of all volumes,)
    labels_ptr,  # (voxels of all volumes,) uint8
    addresses_ptr,  # (N, 5) int64: start, step_d, step_h, step_w, noise seed
    intensities_ptr,  # (N, 2) fp32: factor, standard deviation of the noise
    image_ptr,  # (N, D, H, W)
    label_ptr,  # (N, D, H, W) uint8
    first_voxel,  # index of the slab's first voxel in the whole crop
    voxels,  # D * H * W
    site,  # 0, of the noise
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the cut and flipped crop: its label, and its image, scaled, with noise. Grid (ceil(voxels / BLOCK), N)."""
    sample = tl.program_id(1)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < voxels
    row_ptr = addresses_ptr + 5 * sample
    address = (
        tl.load(row_ptr)
        + (offset // (H * W)) * tl.load(row_ptr + 1)
        + (offset // W % H) * tl.load(row_ptr + 2)
        + (offset % W) * tl.load(row_ptr + 3)
    )
    scale = tl.load(intensities_ptr + 2 * sample)
    deviation = tl.load(intensities_ptr + 2 * sample + 1)
    image = tl.load(images_ptr + address, mask=inside, other=0.0).to(tl.float32) * scale
    label = tl.load(labels_ptr + address, mask=inside, other=0)
    if deviation > 0:
        first, second = site_keys(row_ptr + 4, site)
        image += deviation * _normal((first_voxel + offset).to(tl.uint32), first, second)
    result = sample.to(tl.int64) * voxels + offset
    tl.store(image_ptr + result, image.to(image_ptr.dtype.element_ty), mask=inside)
    tl.store(label_ptr + result, label, mask=inside)


BLOCK = 1024
WARPS = 4


def augment(
    images: Tensor, labels: Tensor, addresses: Tensor, intensities: Tensor, slab: Slab, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return image (N, 1, D, H, W) and label (N, D, H, W).

    See :func:`benchmarks.unet3d.ops.augment.augment_reference`.
    """
    require_contiguous(images=images, labels=labels, addresses=addresses, intensities=intensities)
    count = len(addresses)
    image = images.new_empty((count, *slab.shape, 1), dtype=dtype)
    label = labels.new_empty((count, *slab.shape))
    augment_kernel[(triton.cdiv(slab.voxels, BLOCK), count)](
        images, labels, addresses, intensities, image, label, slab.first_voxel, slab.voxels, 0,
        H=slab.size[1], W=slab.size[2], BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return image.permute(0, 4, 1, 2, 3), label
