"""Pictures to the moments of their latents, as the reference's converter makes them.

The benchmark's moments were made of pictures in [0, 1], though the VAE was trained on [-1, 1]
(https://github.com/mlcommons/training/issues/721); data made otherwise would be other data. Pictures are resized as
float tensors, bicubic and without antialiasing, as torchvision did before 0.17, and are not clamped afterwards: values
a little outside of [0, 1] stay.

Legend: N pictures, S their side in pixels, H height, W width, Z channels of latents, F pixels for one of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stable_diffusion.frozen.published import load_vae
from benchmarks.stable_diffusion.frozen.sizes import VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.operations import choose_layers
from common.formats import jpeg


def read_picture(data: bytes, side: int) -> Tensor:
    """A JPEG as the VAE sees it.

    Args:
        data: the file.
        side: height and width of the result, px.

    Returns:
        (3, S, S) float32, red, green and blue, nominally in [0, 1]: the shorter side resized to S, then the centre.

    Raises:
        ValueError: it is truncated or no JPEG.
    """
    pixels_HW3 = torch.from_numpy(np.array(jpeg.decode(data)))
    image_3HW = pixels_HW3.permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
    return center_cropped(resized(image_3HW, side), side)


def resized(image_3HW: Tensor, side: int) -> Tensor:
    """The shorter side made ``side`` pixels, and the longer one in proportion, rounded down (torchvision's Resize)."""
    height, width = image_3HW.shape[1:]
    shorter, longer = min(height, width), max(height, width)
    if shorter == side:
        return image_3HW
    long_side = int(side * longer / shorter)
    size = (side, long_side) if height <= width else (long_side, side)
    out_13HW = F.interpolate(image_3HW[None], size=size, mode="bicubic", align_corners=False, antialias=False)
    return out_13HW[0]


def center_cropped(image_3HW: Tensor, side: int) -> Tensor:
    """The square of ``side`` pixels in the middle; of an odd rest, halves go to the even number (torchvision's)."""
    top, left = (round((extent - side) / 2.0) for extent in image_3HW.shape[1:])
    return image_3HW[:, top : top + side, left : left + side].contiguous()


class MomentsEncoder:
    """The VAE's encoder with published weights.

    Args:
        sizes: of the VAE.
        checkpoint: the file that has it.
        digest: that this must have; None for any.
        device: of the VAE. On a GPU its convolutions have TF32's mantissa, PyTorch's default, as the reference's had.

    Raises:
        CheckpointError: the file is missing, damaged or another.
    """

    def __init__(self, sizes: VaeSizes, checkpoint: Path, digest: str | None, device: torch.device) -> None:
        vae = AutoencoderKL(sizes)
        load_vae(checkpoint, digest, vae)
        del vae.decoder  # half of it, which nothing here needs
        self._vae = vae.to(device).to(memory_format=torch.channels_last)
        choose_layers(self._vae, {}, torch.float32)
        self._device = device

    @torch.no_grad()
    def __call__(self, images_N3SS: Tensor) -> Tensor:
        """(N, 2 Z, S / F, S / F) float32 in the memory of the host: means, then log-variances."""
        images = images_N3SS.to(self._device, memory_format=torch.channels_last, non_blocking=True)
        return self._vae.encode_moments(images).cpu().contiguous()
