"""The autoencoder between pictures and latents (Rombach et al. 2022, section 3.1; AutoencoderKL with factor 8).

Shapes: N pictures, C channels, H and W pixels; latents have Z channels and are smaller by a factor F. Parameters have
the names of the published checkpoint, below ``first_stage_model``. Activations are in channels_last memory, where the
tokens of the attention are a view.

To add a bias to a convolution's result would need a separate pass over very large tensors. Instead, the next group
norm adds the bias while it reads (:class:`_Sum`), for both terms of a residual at once. Only before resampling, the
bias is added in a separate pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.inference import freeze
from benchmarks.stable_diffusion.frozen.sizes import VaeSizes
from common.nn.convolution import UpsampleConvolution
from common.nn.group_norm import GroupNorm

IMAGE_CHANNELS = 3


class AutoencoderKL(nn.Module):
    """Frozen network that maps pictures to moments of latents, and latents to pictures."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.sizes = sizes
        moments = 2 * sizes.latent_channels
        self.encoder = _Encoder(sizes)
        self.decoder = _Decoder(sizes)
        self.quant_conv = nn.Conv2d(moments, moments, 1)
        self.post_quant_conv = nn.Conv2d(sizes.latent_channels, sizes.latent_channels, 1)
        freeze(self)

    def encode_moments(self, images_N3HW: Tensor) -> Tensor:
        """Return mean and log-variance of the latents, not scaled.

        Args:
            images_N3HW: in the network's dtype; H and W multiples of F. The benchmark's moments come from pictures in
                [0, 1], although the network was trained on [-1, 1].

        Returns:
            (N, 2 Z, H / F, W / F): Z channels of means, then Z of log-variances.
        """
        moments: Tensor = self.quant_conv(self.encoder(images_N3HW.contiguous(memory_format=torch.channels_last)))
        return moments

    def decode(self, z_NZhw: Tensor) -> Tensor:
        """Decode latents to pictures.

        Args:
            z_NZhw: in the network's dtype and scale: latents of a diffusion model must be divided by ``sizes.scale``
                first.

        Returns:
            (N, 3, F h, F w), nominally in [-1, 1], not clamped.
        """
        images: Tensor = self.decoder(self.post_quant_conv(z_NZhw.contiguous(memory_format=torch.channels_last)))
        return images


class _Sum(NamedTuple):
    """A tensor whose bias is still to be added: maps + bias.

    Attributes:
        maps_NCHW: feature maps in channels_last memory; may be overwritten.
        bias_1C: bias per channel.
    """

    maps_NCHW: Tensor
    bias_1C: Tensor

    def added(self) -> Tensor:
        """Add the bias in place and return the sum."""
        return self.maps_NCHW.add_(self.bias_1C[:, :, None, None])


def _convolved(convolution: nn.Conv2d, x_NCHW: Tensor) -> _Sum:
    assert convolution.bias is not None
    maps_NCHW = F.conv2d(x_NCHW, convolution.weight, None, convolution.stride, convolution.padding)
    return _Sum(maps_NCHW, convolution.bias[None])


def _norm(sizes: VaeSizes, channels: int, silu: bool = True) -> GroupNorm:
    """Return a group norm; with ``silu``, SiLU follows. The attention's norm has none."""
    return GroupNorm(channels, sizes.groups, sizes.epsilon, silu, added=True)


def _normed(norm: GroupNorm, x: _Sum) -> Tensor:
    normed = norm(x.maps_NCHW, added=x.bias_1C.expand(len(x.maps_NCHW), -1))
    assert isinstance(normed, Tensor)
    return normed


class _Encoder(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        widths = [sizes.channels * multiplier for multiplier in sizes.multipliers]
        self.conv_in = nn.Conv2d(IMAGE_CHANNELS, sizes.channels, 3, padding=1)
        self.down = nn.ModuleList()
        channels = sizes.channels
        for level, width in enumerate(widths):
            last = level == len(widths) - 1
            self.down.append(_Level(sizes, channels, width, sizes.blocks, None if last else _Downsample(width)))
            channels = width
        self.mid = _Middle(sizes, channels)
        self.norm_out = _norm(sizes, channels)
        self.conv_out = nn.Conv2d(channels, 2 * sizes.latent_channels, 3, padding=1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = _convolved(self.conv_in, x_NCHW)
        for level in self.down:
            x = level(x)
        out: Tensor = self.conv_out(_normed(self.norm_out, self.mid(x)))
        return out


class _Decoder(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        widths = [sizes.channels * multiplier for multiplier in sizes.multipliers]
        channels = widths[-1]
        self.conv_in = nn.Conv2d(sizes.latent_channels, channels, 3, padding=1)
        self.mid = _Middle(sizes, channels)
        levels: list[nn.Module] = []
        for level, width in reversed(list(enumerate(widths))):
            upsample = _VaeUpsample(width) if level else None
            levels.append(_Level(sizes, channels, width, sizes.blocks + 1, upsample))
            channels = width
        self.up = nn.ModuleList(reversed(levels))  # index 0 is full resolution; runs in reverse
        self.norm_out = _norm(sizes, channels)
        self.conv_out = nn.Conv2d(channels, IMAGE_CHANNELS, 3, padding=1)

    def forward(self, z_NZhw: Tensor) -> Tensor:
        x = self.mid(_convolved(self.conv_in, z_NZhw))
        for level in reversed(self.up):
            x = level(x)
        out: Tensor = self.conv_out(_normed(self.norm_out, x))
        return out


class _Level(nn.Module):
    """Residual blocks of one resolution, and the resampling to the next."""

    def __init__(
        self, sizes: VaeSizes, channels: int, width: int, blocks: int, resample: _Downsample | _VaeUpsample | None
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            _ResidualBlock(sizes, width if index else channels, width) for index in range(blocks)
        )
        self.downsample = resample if isinstance(resample, _Downsample) else None
        self.upsample = resample if isinstance(resample, _VaeUpsample) else None

    def forward(self, x: _Sum) -> _Sum:
        for block in self.block:
            x = block(x)
        for resample in (self.downsample, self.upsample):
            if resample is not None:
                x = resample(x)
        return x


class _Downsample(nn.Module):
    """Strided convolution that halves height and width; zero padding at the bottom and the right only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: _Sum) -> _Sum:
        return _convolved(self.conv, F.pad(x.added(), (0, 1, 0, 1)))


class _VaeUpsample(nn.Module):
    """Upsampling that doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = UpsampleConvolution(channels)

    def forward(self, x: _Sum) -> _Sum:
        assert self.conv.bias is not None
        return _Sum(self.conv(x.added(), biased=False), self.conv.bias[None])


class _Middle(nn.Module):
    def __init__(self, sizes: VaeSizes, channels: int) -> None:
        super().__init__()
        self.block_1 = _ResidualBlock(sizes, channels, channels)
        self.attn_1 = _VaeAttention(sizes, channels)
        self.block_2 = _ResidualBlock(sizes, channels, channels)

    def forward(self, x: _Sum) -> _Sum:
        out: _Sum = self.block_2(self.attn_1(self.block_1(x)))
        return out


class _ResidualBlock(nn.Module):
    def __init__(self, sizes: VaeSizes, channels: int, width: int) -> None:
        super().__init__()
        self.norm1 = _norm(sizes, channels)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.norm2 = _norm(sizes, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(channels, width, 1) if channels != width else None

    def forward(self, x: _Sum) -> _Sum:
        hidden = _convolved(self.conv1, _normed(self.norm1, x))
        hidden = _convolved(self.conv2, _normed(self.norm2, hidden))
        shortcut = self.nin_shortcut
        if shortcut is not None:  # the shortcut applies to the pending bias, too
            bias_1C = F.linear(x.bias_1C, shortcut.weight.flatten(1), shortcut.bias)
            x = _Sum(_convolved(shortcut, x.maps_NCHW).maps_NCHW, bias_1C)
        return _Sum(hidden.maps_NCHW.add_(x.maps_NCHW), hidden.bias_1C + x.bias_1C)


class _VaeAttention(nn.Module):
    """Attention with one head, too wide for the faster implementations of :mod:`common.ops.dense_attention`."""

    def __init__(self, sizes: VaeSizes, channels: int) -> None:
        super().__init__()
        self.norm = _norm(sizes, channels, silu=False)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: _Sum) -> _Sum:
        normed = _normed(self.norm, x)
        height, width = normed.shape[2:]
        q_N1SC, k_N1SC, v_N1SC = (
            convolution(normed).flatten(2).mT.unsqueeze(1) for convolution in (self.q, self.k, self.v)
        )
        out_N1SC = F.scaled_dot_product_attention(q_N1SC, k_N1SC, v_N1SC)
        out_NCHW = out_N1SC.squeeze(1).mT.unflatten(2, (height, width))
        out = _convolved(self.proj_out, out_NCHW)
        return _Sum(out.maps_NCHW.add_(x.maps_NCHW), out.bias_1C + x.bias_1C)


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
