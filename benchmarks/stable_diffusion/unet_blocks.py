"""The blocks of the U-Net.

The first convolution of a residual block has no bias here. The second norm adds that bias, together with the time
embedding, while it reads its input (:class:`TimeProjections` has the bias). In a transformer, spatial positions are
tokens; in channels_last memory this is a view. Where possible, biases are added by the next operation that reads the
product (layer norm with residual, GEGLU).

Legend: N images, C channels, E features of the time embedding, S = H W positions of an image, R = N S rows, T tokens of
a caption, K features of a token, M rows of all caption projections, h heads, D their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.residual import add_residual, add_shortcut, maps_of, rows_of
from benchmarks.stable_diffusion.unet_architecture import (
    BlockPlan,
    Convolution,
    Downsampling,
    Layer,
    Residual,
    Transformer,
    UNetArchitecture,
)
from benchmarks.stable_diffusion.unet_operations import Operations
from common.nn.convolution import UpsampleConvolution
from common.nn.group_norm import GroupNorm, LayerNorm


class ResidualBlock(nn.Module):
    """A residual block: norm, SiLU and convolution, twice; the time embedding is added in between."""

    def __init__(self, plan: Residual, architecture: UNetArchitecture, operations: Operations) -> None:
        super().__init__()
        self._row_sums = operations.row_sums
        inputs, channels = sum(plan.inputs), plan.channels
        groups, epsilon = architecture.norm_groups, architecture.norm_epsilon
        self.in_layers = nn.ModuleDict(
            {
                "0": GroupNorm(inputs, groups, epsilon, silu=True, inputs=len(plan.inputs)),
                "2": nn.Conv2d(inputs, channels, 3, padding=1, bias=False),
            }
        )
        self.out_layers = nn.ModuleDict(
            {
                "0": GroupNorm(channels, groups, epsilon, silu=True, added=True),
                "3": nn.Conv2d(channels, channels, 3, padding=1),
            }
        )
        self.skip_connection = nn.Conv2d(inputs, channels, 1) if plan.shortcut else None

    def forward(self, inputs: tuple[Tensor, ...], added_NC: Tensor) -> Tensor:
        """Map one or two (N, C_i, H, W) in channels_last memory to (N, C, H, W).

        Args:
            inputs: used as if concatenated along C; the concatenation is never written to memory.
            added_NC: projected time embedding plus the bias of the first convolution.
        """
        normed_NCHW, kept = self.in_layers["0"](*inputs, keep=True)
        h_NCHW = self.in_layers["2"](normed_NCHW)
        normed_NCHW = self.out_layers["0"](h_NCHW, added=added_NC)
        last, shortcut = self.out_layers["3"], self.skip_connection
        assert isinstance(last, nn.Conv2d)
        assert last.bias is not None
        if shortcut is None:
            y_NCHW = F.conv2d(normed_NCHW, last.weight, last.bias.detach(), padding=1)
            y_RC = add_residual(rows_of(y_NCHW), last.bias, rows_of(kept[0]), self._row_sums)
            return maps_of(y_RC, y_NCHW)
        assert shortcut.bias is not None
        y_NCHW = F.conv2d(normed_NCHW, last.weight, padding=1)
        return add_shortcut(y_NCHW, last.bias + shortcut.bias, shortcut.weight, kept, self._row_sums)


class Downsample(nn.Module):
    """A 3x3 convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, 2H, 2W) to (N, C, H, W)."""
        y_NCHW: Tensor = self.op(x_NCHW)
        return y_NCHW


class Upsample(nn.Module):
    """Nearest upsampling by 2 and a 3x3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = UpsampleConvolution(channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, 2H, 2W)."""
        y_NCHW: Tensor = self.conv(x_NCHW)
        return y_NCHW


class SelfAttention(nn.Module):
    """Weights of the self-attention; rows of ``to_qkv``: queries, keys, values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.to_out = nn.ModuleDict({"0": nn.Linear(channels, channels)})


class CrossAttention(nn.Module):
    """Weights of the cross-attention; those of keys and values are in ``CaptionProjections``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_out = nn.ModuleDict({"0": nn.Linear(channels, channels)})


class GatedMlp(nn.Module):
    """Weights of the MLP with GEGLU and 4 C hidden features; rows of ``net.0.proj``: value, gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        up = nn.ModuleDict({"proj": nn.Linear(channels, 8 * channels)})
        self.net = nn.ModuleDict({"0": up, "2": nn.Linear(4 * channels, channels)})


class TransformerBlock(nn.Module):
    """Weights of self-attention, cross-attention and MLP, and of the norm before each."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.attn1 = SelfAttention(channels)
        self.attn2 = CrossAttention(channels)
        self.ff = GatedMlp(channels)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(channels, epsilon) for _ in range(3))


class SpatialTransformer(nn.Module):
    """Group norm, linear layer, one transformer block, linear layer, and the residual."""

    def __init__(self, plan: Transformer, architecture: UNetArchitecture, operations: Operations) -> None:
        super().__init__()
        channels = plan.channels
        self.norm = GroupNorm(channels, architecture.transformer_norm_groups, architecture.transformer_norm_epsilon)
        self.proj_in = nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels, architecture.norm_epsilon)])
        self.proj_out = nn.Linear(channels, channels)
        self._heads = channels // architecture.head_channels
        self._geglu, self._row_sums = operations.geglu, operations.row_sums
        positions = (architecture.latent_size // plan.factor) ** 2
        self._self_attention = operations.attention[positions]
        self._cross_attention = operations.cross_attention[positions]

    def forward(self, x_NCHW: Tensor, keys_NTC: Tensor, values_NTC: Tensor) -> Tensor:
        """Map (N, C, H, W) in channels_last memory to the same shape.

        Args:
            keys_NTC, values_NTC: projected captions; may be views of wider rows.
        """
        normed_NCHW, (kept_NCHW,) = self.norm(x_NCHW, keep=True)
        block: Any = self.transformer_blocks[0]
        images, heads = x_NCHW.shape[0], self._heads

        h_RC = F.linear(rows_of(normed_NCHW), self.proj_in.weight)
        x_RC, normed_RC = block.norm1(h_RC, added=self.proj_in.bias)

        qkv_NS3hD = block.attn1.to_qkv(normed_RC).view(images, -1, 3, heads, x_RC.shape[1] // heads)
        h_RC = self._self_attention.packed(qkv_NS3hD).view_as(x_RC)
        out = block.attn1.to_out["0"]
        x_RC, normed_RC = block.norm2(F.linear(h_RC, out.weight), x_RC, added=out.bias)

        q_NShD = block.attn2.to_q(normed_RC).view(images, -1, heads, x_RC.shape[1] // heads)
        keys, values = (x_NTC.unflatten(2, (heads, -1)) for x_NTC in (keys_NTC, values_NTC))
        h_RC = self._cross_attention(q_NShD, keys, values).view_as(x_RC)
        out = block.attn2.to_out["0"]
        x_RC, normed_RC = block.norm3(F.linear(h_RC, out.weight), x_RC, added=out.bias)

        up, down = block.ff.net["0"]["proj"], block.ff.net["2"]
        gated = self._geglu(F.linear(normed_RC, up.weight), up.bias)
        x_RC = self._with_residual(down, gated, x_RC)
        return maps_of(self._with_residual(self.proj_out, x_RC, rows_of(kept_NCHW)), x_NCHW)

    def _with_residual(self, linear: nn.Linear, x_RC: Tensor, residual_RC: Tensor) -> Tensor:
        """Return a biased product plus its residual."""
        y_RC = F.linear(x_RC, linear.weight, linear.bias.detach())
        return add_residual(y_RC, linear.bias, residual_RC, self._row_sums)


class UNetBlock(nn.Module):
    """The layers of one :class:`BlockPlan`; submodules have the published numbers as names."""

    def __init__(self, plan: BlockPlan, architecture: UNetArchitecture, operations: Operations) -> None:
        super().__init__()
        for number, layer in enumerate(plan.layers):
            self.add_module(str(number), _built(layer, architecture, operations))

    def forward(
        self, inputs: tuple[Tensor, ...], added: Sequence[Tensor], captions: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Run the layers in order.

        Args:
            inputs: one or two (N, C_i, H, W) in channels_last memory; only a residual block can take two.
            added: projected time embedding plus the first convolution's bias, (N, C), one per residual block.
            captions: keys and values for each transformer.
        """
        added_left, captions_left = list(added), list(captions)
        for layer in self.children():
            if isinstance(layer, ResidualBlock):
                inputs = (layer(inputs, added_left.pop(0)),)
            elif isinstance(layer, SpatialTransformer):
                inputs = (layer(inputs[0], *captions_left.pop(0)),)
            else:
                inputs = (layer(inputs[0]),)
        return inputs[0]


def _built(layer: Layer, architecture: UNetArchitecture, operations: Operations) -> nn.Module:
    if isinstance(layer, Convolution):
        return nn.Conv2d(layer.inputs, layer.channels, 3, padding=1)
    if isinstance(layer, Residual):
        return ResidualBlock(layer, architecture, operations)
    if isinstance(layer, Transformer):
        return SpatialTransformer(layer, architecture, operations)
    return Downsample(layer.channels) if isinstance(layer, Downsampling) else Upsample(layer.channels)


class TimeEmbedding(nn.Module):
    """Cosines and sines of the time step, followed by two linear layers, each with SiLU.

    Args:
        channels: input features of the first linear layer; the first half are cosines, the second half sines.
        width: E.
        device: device of the constant frequencies, which ``.to()`` does not move.
        dtype: dtype of the result. The caller converts the linear layers to it.
    """

    def __init__(self, channels: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(channels, width))
        self.add_module("2", nn.Linear(width, width))
        self._dtype = dtype
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(channels // 2, dtype=torch.float64, device="cpu") / (channels // 2)
        # not a buffer: the values are constant, so checkpoints and transfers do not need them
        self._frequencies = torch.pow(10_000.0, -exponents).to(device, precision)

    def forward(self, t_N: Tensor) -> Tensor:
        """Embed time steps (any integers) as (N, E); the SiLU that precedes every projection is included."""
        angles = t_N.unsqueeze(1) * self._frequencies
        waves = torch.cat([angles.cos(), angles.sin()], 1).to(self._dtype)
        first, second = self.children()
        return F.silu(second(F.silu(first(waves))))


@dataclass(frozen=True)
class LayerRows:
    """The rows of one weight that serves many layers: which rows belong to which layer.

    Attributes:
        names: published names of the layers, in the order of the rows.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]


class TimeProjections(nn.Module):
    """The vectors that residual blocks add between their convolutions, computed by one product for all blocks.

    Attributes:
        weight, bias: parameters of the projections of the time embedding.
        convolution_bias: biases of the blocks' first convolutions.
    """

    def __init__(self, architecture: UNetArchitecture) -> None:
        super().__init__()
        self.rows = time_rows(architecture)
        total = sum(self.rows.counts)
        self.weight = nn.Parameter(torch.empty(total, architecture.time_width))
        self.bias = nn.Parameter(torch.empty(total))
        self.convolution_bias = nn.Parameter(torch.empty(total))

    def forward(self, embedding_NE: Tensor) -> tuple[Tensor, ...]:
        """Return one (N, C) per residual block, in order; all are views of one product."""
        product = F.linear(embedding_NE, self.weight, self.bias + self.convolution_bias)
        return product.split(self.rows.counts, 1)


class CaptionProjections(nn.Module):
    """Keys and values of all cross-attentions, by one product; rows of ``weight``: keys and values of each layer."""

    def __init__(self, architecture: UNetArchitecture) -> None:
        super().__init__()
        self.rows = caption_rows(architecture)
        self.weight = nn.Parameter(torch.empty(sum(self.rows.counts), architecture.context_width))

    def forward(self, context_NTK: Tensor) -> Tensor:
        """Return the product as (N, T, rows of ``weight``)."""
        return F.linear(context_NTK, self.weight)

    def pairs(self, keys_values_NTM: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values (N, T, C) of each transformer, in order, as views."""
        parts = keys_values_NTM.split(self.rows.counts, 2)
        return list(zip(parts[::2], parts[1::2], strict=True))


class UNetOutput(nn.Module):
    """The last layers: norm, SiLU and convolution."""

    def __init__(self, architecture: UNetArchitecture) -> None:
        super().__init__()
        channels = architecture.output_blocks[-1].channels
        self.add_module("0", GroupNorm(channels, architecture.norm_groups, architecture.norm_epsilon, silu=True))
        self.add_module("2", nn.Conv2d(channels, architecture.latent_channels, 3, padding=1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, latent channels, H, W)."""
        norm, convolution = self.children()
        y_NCHW: Tensor = convolution(norm(x_NCHW))
        return y_NCHW


def time_rows(architecture: UNetArchitecture) -> LayerRows:
    """Return the rows of :class:`TimeProjections`."""
    named = architecture.named(Residual)
    return LayerRows(tuple(name for name, _ in named), tuple(layer.channels for _, layer in named))


def caption_rows(architecture: UNetArchitecture) -> LayerRows:
    """Return the rows of :class:`CaptionProjections`; keys and values of a transformer count as one layer each."""
    named = architecture.named(Transformer)
    each = [
        (f"{name}.transformer_blocks.0.attn2.{kind}", layer.channels)
        for name, layer in named
        for kind in ("to_k", "to_v")
    ]
    return LayerRows(tuple(name for name, _ in each), tuple(count for _, count in each))
