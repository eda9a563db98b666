"""Training crops from cached volumes: crop, flip, brightness, noise, cast and layout in one pass.

The host draws a few numbers per sample (:class:`benchmarks.unet3d.crop.CropDraws`); the device reads and writes each
voxel of the crop once. A mirrored crop is read with negative steps, so crop and flip are one address::

    address(d, h, w) = start + d * step_d + h * step_h + w * step_w

Noise is a function of (noise seed of the sample, index of the voxel in the whole crop). So ranks that share a crop
make consistent slabs of it, and all implementations give the same noise.

Shapes: N samples of the micro-batch; D H W axes of the crop. If crops are split, D is that of this rank's slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.unet3d.crop import Slab, VolumeCrop
from common.ops.operation import Operation
from common.ops.random_bits.reference import words
from common.ops.triton_support import triton_kernels

UNIFORM_BITS = 23
"""Random bits of the uniform numbers for the noise; half-integers below 2**23 are exact in fp32."""

COLUMNS = 5
"""Columns of the addresses: start, the three steps, and the noise seed."""


def parameters(crops: Sequence[VolumeCrop], slab: Slab, pin_memory: bool = False) -> dict[str, Tensor]:
    """Return the crops as tensors for the implementations.

    Returns:
        ``addresses`` (N, COLUMNS) int64, and ``intensities`` (N, 2) float32: factor, standard deviation of the noise.
    """
    addresses = [[*_address(crop, slab), crop.draws.noise_seed] for crop in crops]
    intensities = [[crop.draws.scale, crop.draws.deviation] for crop in crops]
    return {
        "addresses": torch.tensor(addresses, dtype=torch.int64, pin_memory=pin_memory),
        "intensities": torch.tensor(intensities, dtype=torch.float32, pin_memory=pin_memory),
    }


def _address(crop: VolumeCrop, slab: Slab) -> tuple[int, int, int, int]:
    """Return the address of the slab's first voxel, and the steps to the next voxel along D, H and W."""
    strides = (crop.shape[1] * crop.shape[2], crop.shape[2], 1)
    lowest = (crop.origin[0] + slab.source_plane(crop.draws.flips[0]), *crop.origin[1:])
    start, steps = crop.offset, list(strides)
    for axis, mirrored in enumerate(crop.draws.flips):
        start += (lowest[axis] + (slab.shape[axis] - 1 if mirrored else 0)) * strides[axis]
        if mirrored:
            steps[axis] = -strides[axis]
    step_d, step_h, step_w = steps
    return start, step_d, step_h, step_w


def noise_of(index: Tensor, seed: Tensor) -> Tensor:
    """Return standard normal numbers, by the transform of Box and Muller in fp32.

    Voxels 2i and 2i + 1 are the cosine and the sine of one pair of uniform numbers.

    Args:
        index: index of each voxel in its crop, 0 ... 2**31 - 1.
        seed: int64; must broadcast with ``index``.
    """
    even = index & ~1
    radius = torch.sqrt(-2.0 * torch.log(_uniform(even, seed)))
    turn = _uniform(even + 1, seed) - 0.25 * (index & 1)
    return radius * torch.cos((2.0 * math.pi) * turn)


def _uniform(index: Tensor, seed: Tensor) -> Tensor:
    bits = (words(index, seed) >> (32 - UNIFORM_BITS)) & ((1 << UNIFORM_BITS) - 1)
    return (bits.float() + 0.5) * 2.0**-UNIFORM_BITS


def augment_reference(
    images: Tensor, labels: Tensor, addresses: Tensor, intensities: Tensor, slab: Slab, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make the crops of a micro-batch.

    Args:
        images: (voxels,) fp32, all volumes.
        labels: (voxels,) uint8, at the same offsets.
        addresses, intensities: see :func:`parameters`; on the device of the volumes.
        slab: the part of the crops to make.
        dtype: dtype of the resulting images; arithmetic is fp32.

    Returns:
        Image (N, 1, D, H, W) in channels_last_3d memory, and label (N, D, H, W) uint8.
    """
    depth, height, width = (torch.arange(size, device=images.device) for size in slab.shape)
    start, step_d, step_h, step_w, seed = addresses[:, :, None].unbind(1)
    address = (
        start[..., None, None]
        + (step_d * depth)[:, :, None, None]
        + (step_h * height)[:, None, :, None]
        + (step_w * width)[:, None, None, :]
    ).flatten(1)
    index = torch.arange(slab.first_voxel, slab.first_voxel + slab.voxels, device=images.device)
    scale, deviation = intensities[:, :, None].unbind(1)
    image = images[address].float() * scale
    noisy = torch.arange(len(addresses), device=images.device)
    if images.device.type == "cpu":  # on a GPU this would synchronise
        noisy = noisy[deviation[:, 0] > 0]
    image[noisy] += deviation[noisy] * noise_of(index, seed[noisy])
    shape = (len(addresses), *slab.shape)
    image_NDHWC = image.to(dtype).view(*shape, 1)
    return image_NDHWC.permute(0, 4, 1, 2, 3), labels[address].view(shape)


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
