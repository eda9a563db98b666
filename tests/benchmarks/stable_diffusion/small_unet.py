"""A small U-Net with every kind of block, inputs for it, and the network by its definition.

The definition is written in plain functions over tensors with published names: one layout of images (N, C, H, W), with
explicit concatenations and a separate product for each projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture

SMALL = UNetArchitecture(
    latent_channels=4,
    latent_size=8,
    model_channels=8,
    channel_multipliers=(1, 2),
    residual_blocks=1,
    attention_levels=(0,),
    head_channels=4,
    context_width=6,
    context_length=5,
    norm_groups=4,
    norm_epsilon=1e-5,
    transformer_norm_groups=8,
    transformer_norm_epsilon=1e-6,
)
"""Widths differ between levels, and groups between norms. Pairs of inputs have equal and different widths, and 24
channels together, whose groups of 6 contain channels of both inputs."""

ABAR = abar(1000, 0.00085, 0.012)
"""Schedule of the benchmark, float64 (1000,)."""


def small_unet(
    dtype: torch.dtype = torch.float64,
    zero_std: float = 0.1,
    seed: int = 0,
    implementations: Mapping[str, str] | None = None,
) -> UNet:
    """Return a network in which no parameter is zero, unless ``zero_std`` is 0."""
    generator = torch.Generator().manual_seed(seed)
    model = UNet(SMALL, implementations, generator, dtype=dtype, zero_std=zero_std)
    if zero_std:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or ".0.weight" in name or ".0.bias" in name:
                    noise = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
                    parameter.add_(noise.to(parameter))
    return model


def inputs(
    count: int = 2, dtype: torch.dtype = torch.float64, architecture: UNetArchitecture = SMALL
) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents, time steps and captions."""
    generator, size = torch.Generator().manual_seed(7), architecture.latent_size
    x_NCHW = torch.randn((count, architecture.latent_channels, size, size), generator=generator)
    t_N = torch.randint(1000, (count,), generator=generator)
    context_NTK = torch.randn((count, architecture.context_length, architecture.context_width), generator=generator)
    return x_NCHW.to(dtype), t_N, context_NTK.to(dtype)


State = Mapping[str, Tensor]


def _group_norm(x: Tensor, state: State, name: str, groups: int, epsilon: float) -> Tensor:
    images, channels, height, width = x.shape
    parts = x.reshape(images, groups, -1)
    mean = parts.mean(-1, keepdim=True)
    variance = (parts - mean).square().mean(-1, keepdim=True)
    normed = ((parts - mean) / (variance + epsilon).sqrt()).reshape(images, channels, height, width)
    return normed * state[f"{name}.weight"].view(-1, 1, 1) + state[f"{name}.bias"].view(-1, 1, 1)


def _layer_norm(x: Tensor, state: State, name: str) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def _linear(x: Tensor, state: State, name: str) -> Tensor:
    product = x @ state[f"{name}.weight"].T
    return product + state[f"{name}.bias"] if f"{name}.bias" in state else product


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _convolution(x: Tensor, state: State, name: str, stride: int = 1) -> Tensor:
    weight = state[f"{name}.weight"]
    return F.conv2d(x, weight, state[f"{name}.bias"], stride, padding=weight.shape[-1] // 2)


def _residual(x: Tensor, embedding: Tensor, state: State, name: str, shape: UNetArchitecture) -> Tensor:
    normed = _group_norm(x, state, f"{name}.in_layers.0", shape.norm_groups, 1e-5)
    h = _convolution(_silu(normed), state, f"{name}.in_layers.2")
    h = h + _linear(_silu(embedding), state, f"{name}.emb_layers.1")[:, :, None, None]
    normed = _group_norm(h, state, f"{name}.out_layers.0", shape.norm_groups, 1e-5)
    h = _convolution(_silu(normed), state, f"{name}.out_layers.3")
    if f"{name}.skip_connection.weight" in state:
        x = _convolution(x, state, f"{name}.skip_connection")
    return x + h


def _attention(x: Tensor, context: Tensor, state: State, name: str, head_channels: int) -> Tensor:
    q, k, v = (_linear(of, state, f"{name}.{kind}") for of, kind in ((x, "to_q"), (context, "to_k"), (context, "to_v")))
    heads = []
    for start in range(0, q.shape[-1], head_channels):
        part = slice(start, start + head_channels)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(head_channels)
        heads.append(torch.softmax(scores, -1) @ v[..., part])
    return _linear(torch.cat(heads, -1), state, f"{name}.to_out.0")


def _transformer(x: Tensor, context: Tensor, state: State, name: str, shape: UNetArchitecture) -> Tensor:
    normed = _group_norm(x, state, f"{name}.norm", shape.transformer_norm_groups, 1e-6)
    h = _linear(normed.flatten(2).transpose(1, 2), state, f"{name}.proj_in")
    block = f"{name}.transformer_blocks.0"
    normed = _layer_norm(h, state, f"{block}.norm1")
    h = h + _attention(normed, normed, state, f"{block}.attn1", shape.head_channels)
    h = h + _attention(_layer_norm(h, state, f"{block}.norm2"), context, state, f"{block}.attn2", shape.head_channels)
    value, gate = _linear(_layer_norm(h, state, f"{block}.norm3"), state, f"{block}.ff.net.0.proj").chunk(2, -1)
    gated = value * gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    h = h + _linear(gated, state, f"{block}.ff.net.2")
    return x + _linear(h, state, f"{name}.proj_out").transpose(1, 2).reshape(x.shape)


def _block(x: Tensor, embedding: Tensor, context: Tensor, state: State, name: str, shape: UNetArchitecture) -> Tensor:
    """Run the layers of a block, which the names of its tensors determine."""
    for number in range(3):
        layer = f"{name}.{number}"
        if f"{layer}.in_layers.0.weight" in state:
            x = _residual(x, embedding, state, layer, shape)
        elif f"{layer}.proj_in.weight" in state:
            x = _transformer(x, context, state, layer, shape)
        elif f"{layer}.op.weight" in state:
            x = _convolution(x, state, f"{layer}.op", stride=2)
        elif f"{layer}.conv.weight" in state:
            x = _convolution(x.repeat_interleave(2, 2).repeat_interleave(2, 3), state, f"{layer}.conv")
        elif f"{layer}.weight" in state:
            x = _convolution(x, state, layer)
    return x


def velocity(x: Tensor, t: Tensor, context: Tensor, state: State, shape: UNetArchitecture) -> Tensor:
    """Return the velocity (N, C, H, W) by the definition, with the published tensors ``state``."""
    half = shape.model_channels // 2
    frequencies = torch.tensor([math.exp(-math.log(10_000) * i / half) for i in range(half)], dtype=x.dtype)
    angles = t[:, None] * frequencies
    waves = torch.cat([torch.cos(angles), torch.sin(angles)], 1)
    embedding = _linear(_silu(_linear(waves, state, "time_embed.0")), state, "time_embed.2")
    blocks = len({name.split(".")[1] for name in state if name.startswith("input_blocks.")})
    skips = []
    for number in range(blocks):
        x = _block(x, embedding, context, state, f"input_blocks.{number}", shape)
        skips.append(x)
    x = _block(x, embedding, context, state, "middle_block", shape)
    for number in range(blocks):
        pair = torch.cat([x, skips.pop()], 1)
        x = _block(pair, embedding, context, state, f"output_blocks.{number}", shape)
    return _convolution(_silu(_group_norm(x, state, "out.0", shape.norm_groups, 1e-5)), state, "out.2")
