"""The blocks of the U-Net but for the transformer.

A residual block's first convolution has no bias of its own here: the second norm adds it, together with the time
embedding, while it reads (:class:`TimeProjections` holds it).

Legend: N images, C channels, E features of the time embedding, T tokens of a caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.architecture import (
    Architecture,
    BlockPlan,
    Convolution,
    Downsampling,
    Layer,
    Residual,
    Transformer,
)
from benchmarks.stable_diffusion.operations import Operations
from benchmarks.stable_diffusion.residual import add_residual, maps_of, rows_of
from benchmarks.stable_diffusion.shortcut import add_shortcut
from benchmarks.stable_diffusion.transformer import SpatialTransformer
from common.nn.group_norm import GroupNorm
from common.nn.upsample_convolution import UpsampleConvolution


class ResidualBlock(nn.Module):
    """Norm, SiLU, convolution, twice, with the time embedding between and a shortcut beside."""

    def __init__(self, plan: Residual, architecture: Architecture, operations: Operations) -> None:
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
            inputs: taken as their concatenation, which is never written.
            added_NC: time embedding and bias of the first convolution.
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
    """Nearest upsampling and a 3x3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = UpsampleConvolution(channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, 2H, 2W)."""
        y_NCHW: Tensor = self.conv(x_NCHW)
        return y_NCHW


class Block(nn.Module):
    """The layers of one :class:`BlockPlan`, numbered as published."""

    def __init__(self, plan: BlockPlan, architecture: Architecture, operations: Operations) -> None:
        super().__init__()
        for number, layer in enumerate(plan.layers):
            self.add_module(str(number), _built(layer, architecture, operations))

    def forward(
        self, inputs: tuple[Tensor, ...], added: Sequence[Tensor], captions: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Run the layers one after the other.

        Args:
            inputs: one or two (N, C_i, H, W) in channels_last memory, of which the first layer takes the pair.
            added: of each residual block, see :class:`ResidualBlock`.
            captions: keys and values of each transformer.
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


def _built(layer: Layer, architecture: Architecture, operations: Operations) -> nn.Module:
    if isinstance(layer, Convolution):
        return nn.Conv2d(layer.inputs, layer.channels, 3, padding=1)
    if isinstance(layer, Residual):
        return ResidualBlock(layer, architecture, operations)
    if isinstance(layer, Transformer):
        return SpatialTransformer(layer, architecture, operations)
    return Downsample(layer.channels) if isinstance(layer, Downsampling) else Upsample(layer.channels)


class TimeEmbedding(nn.Module):
    """Cosines and sines of the time step, and two products with SiLU behind each.

    Args:
        channels: of the first product's input, half of them cosines, which come first.
        width: E.
        device, dtype: of the result.
    """

    def __init__(self, channels: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(channels, width))
        self.add_module("2", nn.Linear(width, width))
        self._dtype = dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(channels // 2, dtype=torch.float64, device="cpu") / (channels // 2)
        # no buffer: it is the same for ever, so that neither checkpoints nor transfers need it
        self._frequencies = torch.pow(10_000.0, -exponents).to(device, wide)

    def forward(self, t_N: Tensor) -> Tensor:
        """Embed time steps (any integers) as (N, E), with the SiLU that every projection of it begins with."""
        angles = t_N.unsqueeze(1) * self._frequencies
        waves = torch.cat([angles.cos(), angles.sin()], 1).to(self._dtype)
        first, second = self.children()
        return F.silu(second(F.silu(first(waves))))


@dataclass(frozen=True)
class Rows:
    """Where the rows of a product for many layers belong.

    Attributes:
        names: published name of each layer.
        counts: rows of each.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]


class TimeProjections(nn.Module):
    """What every residual block adds between its convolutions, by one product for all of them.

    Attributes:
        weight, bias: of the projections of the time embedding.
        convolution_bias: of the blocks' first convolutions.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.rows = time_rows(architecture)
        total = sum(self.rows.counts)
        self.weight = nn.Parameter(torch.empty(total, architecture.time_width))
        self.bias = nn.Parameter(torch.empty(total))
        self.convolution_bias = nn.Parameter(torch.empty(total))

    def forward(self, embedding_NE: Tensor) -> tuple[Tensor, ...]:
        """One (N, C) for each residual block, in order; views of one product."""
        product = F.linear(embedding_NE, self.weight, self.bias + self.convolution_bias)
        return product.split(self.rows.counts, 1)


class CaptionProjections(nn.Module):
    """Keys and values of all cross-attentions, by one product: rows of ``weight`` are keys, values of each in turn."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.rows = caption_rows(architecture)
        self.weight = nn.Parameter(torch.empty(sum(self.rows.counts), architecture.context_width))

    def forward(self, context_NTK: Tensor) -> Tensor:
        """(N, T, rows of ``weight``)."""
        return F.linear(context_NTK, self.weight)

    def pairs(self, keys_values_NTM: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (N, T, C) of each transformer, in order; views."""
        parts = keys_values_NTM.split(self.rows.counts, 2)
        return list(zip(parts[::2], parts[1::2], strict=True))


class Output(nn.Module):
    """Norm, SiLU and the last convolution."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        channels = architecture.output_blocks[-1].channels
        self.add_module("0", GroupNorm(channels, architecture.norm_groups, architecture.norm_epsilon, silu=True))
        self.add_module("2", nn.Conv2d(channels, architecture.latent_channels, 3, padding=1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to the channels of latents."""
        norm, convolution = self.children()
        y_NCHW: Tensor = convolution(norm(x_NCHW))
        return y_NCHW


def time_rows(architecture: Architecture) -> Rows:
    """Rows of :class:`TimeProjections`."""
    named = architecture.named(Residual)
    return Rows(tuple(name for name, _ in named), tuple(layer.channels for _, layer in named))


def caption_rows(architecture: Architecture) -> Rows:
    """Rows of :class:`CaptionProjections`, keys and values of a transformer as one layer each."""
    named = architecture.named(Transformer)
    each = [
        (f"{name}.transformer_blocks.0.attn2.{kind}", layer.channels)
        for name, layer in named
        for kind in ("to_k", "to_v")
    ]
    return Rows(tuple(name for name, _ in each), tuple(count for _, count in each))
