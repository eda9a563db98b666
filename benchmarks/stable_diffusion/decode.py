"""Conversion of sampled latents to pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL


def pictures_of(latents_NChw: Tensor, vae: AutoencoderKL) -> Tensor:
    """Decode latents to pictures as the reference does: map the decoder's range [-1, 1] to [0, 1] and clamp.

    The benchmark trains on latents of pictures in [0, 1], so the pictures look washed out; the rules require this.

    Args:
        latents_NChw: latents in the scale of the U-Net.
        vae: decoder; runs in its own dtype.

    Returns:
        (N, 3, H, W) fp32, or fp64 for an fp64 network.
    """
    dtype = vae.post_quant_conv.weight.dtype
    z_NChw = (latents_NChw / vae.sizes.scale).to(dtype, memory_format=torch.channels_last)
    decoded = vae.decode(z_NChw)
    return ((decoded.to(torch.promote_types(dtype, torch.float32)) + 1) / 2).clamp(0, 1)
