"""Encoders of the training data: pictures become moments of latents, captions become features.

The benchmark's moments come from pictures in [0, 1], although the VAE was trained on [-1, 1]
(https://github.com/mlcommons/training/issues/721). We must do the same to get the same data. Pictures are resized as
float tensors, bicubic without antialiasing, like torchvision before 0.17; values slightly outside of [0, 1] are not
clamped.

Legend: N pictures or captions, S side of a picture in pixels, H height, W width, Z channels of latents, F ratio of
picture to latent size, T tokens of a caption, K features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stable_diffusion.frozen.clip import TextTower
from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.frozen.published import load_text, load_vae
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.unet_operations import choose_layers
from common.formats import jpeg
from common.nn.tf32 import tf32_products


def read_picture(data: bytes, side: int) -> Tensor:
    """Decode a JPEG, resize its shorter side to ``side`` pixels, and crop the central square.

    Returns:
        (3, S, S) float32, red, green and blue, nominally in [0, 1].

    Raises:
        ValueError: the file is truncated or not a JPEG.
    """
    pixels_HW3 = torch.from_numpy(np.array(jpeg.decode(data)))
    image_3HW = pixels_HW3.permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
    return center_cropped(resized(image_3HW, side), side)


def resized(image_3HW: Tensor, side: int) -> Tensor:
    """Resize bicubically: the shorter side to ``side`` px, the longer in proportion, rounded down (as torchvision)."""
    height, width = image_3HW.shape[1:]
    shorter, longer = min(height, width), max(height, width)
    if shorter == side:
        return image_3HW
    long_side = int(side * longer / shorter)
    size = (side, long_side) if height <= width else (long_side, side)
    out_13HW = F.interpolate(image_3HW[None], size=size, mode="bicubic", align_corners=False, antialias=False)
    return out_13HW[0]


def center_cropped(image_3HW: Tensor, side: int) -> Tensor:
    """Crop the central square of ``side`` pixels; half pixels round to even (torchvision's CenterCrop)."""
    top, left = (round((extent - side) / 2.0) for extent in image_3HW.shape[1:])
    return image_3HW[:, top : top + side, left : left + side].contiguous()


class MomentsEncoder:
    """The VAE's encoder with published weights.

    Args:
        checkpoint: file with the weights.
        digest: expected digest of the file; None accepts any.
        device: device of the VAE. On a GPU, convolutions use TF32, the default of PyTorch and of the reference.

    Raises:
        CheckpointError: the file is missing or damaged, or has another digest or other tensors.
    """

    def __init__(self, sizes: VaeSizes, checkpoint: Path, digest: str | None, device: torch.device) -> None:
        vae = AutoencoderKL(sizes)
        load_vae(checkpoint, digest, vae)
        del vae.decoder  # not needed here, and half of the VAE
        self._vae = vae.to(device).to(memory_format=torch.channels_last)
        choose_layers(self._vae, {}, torch.float32)
        self._device = device

    @torch.no_grad()
    def __call__(self, images_N3SS: Tensor) -> Tensor:
        """Encode pictures as (N, 2 Z, S / F, S / F) float32 on the CPU: means, then log-variances."""
        images = images_N3SS.to(self._device, memory_format=torch.channels_last, non_blocking=True)
        return self._vae.encode_moments(images).cpu().contiguous()


class TokenEncoder:
    """The text tower with published weights; maps tokens to features.

    Args:
        checkpoint: file with the weights.
        digest: expected digest of the file; None accepts any.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has another digest or other tensors.
    """

    def __init__(
        self, sizes: TextSizes, checkpoint: Path, digest: str | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._tower = TextTower(sizes).to(device, dtype)
        load_text(checkpoint, digest, self._tower)

    @torch.no_grad()
    def __call__(self, tokens_NT: Tensor) -> Tensor:
        """Encode rows of token ids as (N, T, K)."""
        return self._tower.encode(tokens_NT)


class CaptionEncoder:
    """Tokenizer and fp32 text tower. On a GPU its matrix products use TF32, whose mantissa is as long as that of fp16.

    Args:
        checkpoint: file with the tower's weights.
        digest: expected digest of the file; None accepts any.
        vocabulary: file with the tokenizer's merges.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has another digest or other tensors.
        DataError: the file of merges is missing or damaged.
    """

    def __init__(
        self, sizes: TextSizes, checkpoint: Path, digest: str | None, vocabulary: Path, device: torch.device
    ) -> None:
        self._tokenize = ClipTokenizer(vocabulary, sizes.vocabulary, sizes.context)
        self._encode, self._device = TokenEncoder(sizes, checkpoint, digest, device, torch.float32), device

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Encode captions as (N, T, K) float32 on the CPU; T is the tower's context length, padding included."""
        with tf32_products():
            return self._encode(self._tokenize(captions).to(self._device, non_blocking=True)).cpu()
