"""The U-Net as its definition reads, in plain functions over tensors by their published names.

One image layout (N, C, H, W), every concatenation written, every projection a product of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture

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
    """What a block consists of is read off the names of its tensors."""
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
    """(N, C, H, W) of latents, time steps and captions, by the published tensors ``state``."""
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
