"""Latents that a sampler made to pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL


def pictures_of(latents_NChw: Tensor, vae: AutoencoderKL) -> Tensor:
    """Pictures of latents, as the reference decodes them: the decoder's range of [-1, 1] to [0, 1], cut off there.

    The benchmark trains on latents of pictures in [0, 1], so that pictures look washed out; the rules have it so.

    Args:
        latents_NChw: in the scale in which the U-Net trains.
        vae: decodes them in its own dtype.

    Returns:
        (N, 3, H, W) fp32, or fp64 of a network in fp64.
    """
    dtype = vae.post_quant_conv.weight.dtype
    z_NChw = (latents_NChw / vae.sizes.scale).to(dtype, memory_format=torch.channels_last)
    decoded = vae.decode(z_NChw)
    return ((decoded.to(torch.promote_types(dtype, torch.float32)) + 1) / 2).clamp(0, 1)
