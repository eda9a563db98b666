"""Architecture of the U-Net: its settings, and the layers that follow from them, in the order of the forward pass.

Rombach et al., arXiv:2112.10752, with the sizes of Stable Diffusion v2-base; the benchmark sets its own norm groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast, Each, Positive
from common.errors import ConfigError

TIME_FACTOR = 4
"""Width of the time embedding as a multiple of the model channels."""

Count = Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class Convolution:
    """The first layer of the network, a 3x3 convolution from ``inputs`` to ``channels`` channels.

    Attributes:
        factor: downsampling factor of the output, relative to the latents.
    """

    inputs: int
    channels: int
    factor: int

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds per output position."""
        return 9 * self.inputs * self.channels


@dataclass(frozen=True)
class Residual:
    """A residual block: two 3x3 convolutions and a shortcut.

    Attributes:
        inputs: channels of the input, or of both inputs where a skip connection is concatenated.
        channels: output channels.
        factor: downsampling factor of height and width, relative to the latents.
    """

    inputs: tuple[int, ...]
    channels: int
    factor: int

    @property
    def shortcut(self) -> bool:
        """Return whether the shortcut is a 1x1 convolution, because the number of channels changes."""
        return sum(self.inputs) != self.channels

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds per output position."""
        inputs = sum(self.inputs)
        return self.channels * (9 * inputs + 9 * self.channels + (inputs if self.shortcut else 0))


@dataclass(frozen=True)
class Transformer:
    """A transformer: self-attention, cross-attention and a gated MLP; every spatial position is a token.

    Attributes:
        factor: downsampling factor of height and width, relative to the latents.
    """

    channels: int
    factor: int


@dataclass(frozen=True)
class Downsampling:
    """A 3x3 convolution of stride 2.

    Attributes:
        channels: channels of input and output.
        factor: downsampling factor of the output, relative to the latents.
    """

    channels: int
    factor: int

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds per output position."""
        return 9 * self.channels**2


@dataclass(frozen=True)
class Upsampling:
    """Nearest upsampling by 2 and a 3x3 convolution.

    Attributes:
        channels: channels of input and output.
        factor: downsampling factor of the output, relative to the latents.
    """

    channels: int
    factor: int

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds per output position, by definition; our four 2x2 convolutions need 4/9 of it."""
        return 9 * self.channels**2


Layer = Convolution | Residual | Transformer | Downsampling | Upsampling


@dataclass(frozen=True)
class BlockPlan:
    """A block of the U-Net: its published name, and its layers. The published names number the layers."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def channels(self) -> int:
        """Return the output channels."""
        return self.layers[-1].channels

    @property
    def residuals(self) -> int:
        """Return the number of residual blocks among the layers."""
        return sum(isinstance(layer, Residual) for layer in self.layers)

    @property
    def transformers(self) -> int:
        """Return the number of transformers among the layers."""
        return sum(isinstance(layer, Transformer) for layer in self.layers)


@dataclass(frozen=True)
class UNetArchitecture:
    """The settings of the U-Net.

    Attributes:
        latent_channels: channels of the latents and of the prediction.
        latent_size: height and width of the latents.
        model_channels: channels of the first level.
        channel_multipliers: channels of each level, in ``model_channels``; all levels but the last halve the size.
        residual_blocks: residual blocks per level of the encoder; the decoder has one more.
        attention_levels: indices of the levels with transformers; the middle block always has one.
        head_channels: channels per attention head.
        context_width: features per caption token.
        context_length: tokens per caption.
        norm_groups: groups of the norms in residual blocks and before the last convolution.
        norm_epsilon: epsilon of these norms and of the transformers' layer norms.
        transformer_norm_groups, transformer_norm_epsilon: groups and epsilon of the first norm of a transformer.

    Raises:
        ConfigError: a number of channels is not divisible by its groups or heads, or the levels do not fit.
    """

    latent_channels: Count
    latent_size: Count
    model_channels: Annotated[int, AtLeast(2)]
    channel_multipliers: Annotated[tuple[int, ...], Each(AtLeast(1))]
    residual_blocks: Count
    attention_levels: Annotated[tuple[int, ...], Each(AtLeast(0))]
    head_channels: Count
    context_width: Count
    context_length: Count
    norm_groups: Count
    norm_epsilon: Annotated[float, Positive]
    transformer_norm_groups: Count
    transformer_norm_epsilon: Annotated[float, Positive]

    def __post_init__(self) -> None:
        levels = len(self.channel_multipliers)
        if not levels:
            raise ConfigError("channel_multipliers=[]: at least one level")
        if any(level >= levels for level in self.attention_levels):
            raise ConfigError(f"attention_levels={list(self.attention_levels)}: there are levels 0 to {levels - 1}")
        if self.latent_size % 2 ** (levels - 1):
            raise ConfigError(f"latent_size={self.latent_size}: a multiple of {2 ** (levels - 1)} for {levels} levels")
        if self.model_channels % 2:
            raise ConfigError(f"model_channels={self.model_channels}: even, half cosines and half sines of the time")
        for layer in self.layers():
            if isinstance(layer, Transformer):
                self._check(layer.channels, "head_channels", self.head_channels)
                self._check(layer.channels, "transformer_norm_groups", self.transformer_norm_groups)
            if isinstance(layer, Residual):
                for channels in (sum(layer.inputs), layer.channels):
                    self._check(channels, "norm_groups", self.norm_groups)

    @staticmethod
    def _check(channels: int, name: str, value: int) -> None:
        if channels % value:
            raise ConfigError(f"{name}={value}: a divisor of all channels, and a layer has {channels}")

    @property
    def time_width(self) -> int:
        """Return the number of features of the time embedding."""
        return TIME_FACTOR * self.model_channels

    @functools.cached_property
    def input_blocks(self) -> tuple[BlockPlan, ...]:
        """Return the encoder's blocks; the output of each is also an input of a decoder block."""
        channels, factor = self.model_channels, 1
        layers: list[tuple[Layer, ...]] = [(Convolution(self.latent_channels, channels, factor),)]
        for level, multiplier in enumerate(self.channel_multipliers):
            for _ in range(self.residual_blocks):
                residual = Residual((channels,), multiplier * self.model_channels, factor)
                channels = residual.channels
                layers.append((residual, *self._transformer(level, channels, factor)))
            if level + 1 < len(self.channel_multipliers):
                factor *= 2
                layers.append((Downsampling(channels, factor),))
        return tuple(BlockPlan(f"input_blocks.{number}", each) for number, each in enumerate(layers))

    @property
    def middle_block(self) -> BlockPlan:
        """Return the block between encoder and decoder, at the lowest resolution."""
        channels, factor = self.input_blocks[-1].channels, 2 ** (len(self.channel_multipliers) - 1)
        residual = Residual((channels,), channels, factor)
        return BlockPlan("middle_block", (residual, Transformer(channels, factor), residual))

    @functools.cached_property
    def output_blocks(self) -> tuple[BlockPlan, ...]:
        """Return the decoder's blocks; each takes the previous output and, as second input, an encoder output."""
        kept = [block.channels for block in self.input_blocks]
        channels, factor = self.middle_block.channels, 2 ** (len(self.channel_multipliers) - 1)
        blocks: list[BlockPlan] = []
        for level, multiplier in reversed(list(enumerate(self.channel_multipliers))):
            for number in range(self.residual_blocks + 1):
                residual = Residual((channels, kept.pop()), multiplier * self.model_channels, factor)
                channels = residual.channels
                layers: tuple[Layer, ...] = (residual, *self._transformer(level, channels, factor))
                if level and number == self.residual_blocks:
                    factor //= 2
                    layers = (*layers, Upsampling(channels, factor))
                blocks.append(BlockPlan(f"output_blocks.{len(blocks)}", layers))
        return tuple(blocks)

    def _transformer(self, level: int, channels: int, factor: int) -> tuple[Transformer, ...]:
        return (Transformer(channels, factor),) if level in self.attention_levels else ()

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """Return all blocks in the order of the forward pass."""
        return (*self.input_blocks, self.middle_block, *self.output_blocks)

    def layers(self) -> Iterator[Layer]:
        """Yield the layers of all blocks, in order."""
        for block in self.blocks:
            yield from block.layers

    def named(self, kind: type[Layer]) -> list[tuple[str, Layer]]:
        """Return the published names and layers of one kind, in order."""
        return [
            (f"{block.name}.{number}", layer)
            for block in self.blocks
            for number, layer in enumerate(block.layers)
            if isinstance(layer, kind)
        ]


LINEAR_OF_TRANSFORMER = 20
"""Number of C x C products per token: 2 for input and output, 4 and 2 for the attentions, 12 for the MLP. The keys
and values of captions are not included.
"""


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of the forward pass of one sample."""

    convolution: int
    linear: int
    self_attention: int
    cross_attention: int

    @property
    def total(self) -> int:
        """Return the sum of all kinds."""
        return self.convolution + self.linear + self.self_attention + self.cross_attention


def multiply_adds(architecture: UNetArchitecture) -> MultiplyAdds:
    """Return the multiply-adds of the forward pass of one sample of ``latent_size`` and ``context_length``.

    Upsampling counts by its definition: a 3x3 convolution at the larger size.
    """
    size, keys = architecture.latent_size, architecture.context_length
    width, context = architecture.time_width, architecture.context_width
    convolution = 9 * size**2 * architecture.model_channels * architecture.latent_channels  # the last one
    linear = width * (architecture.model_channels + width)
    self_attention = cross_attention = 0
    for layer in architecture.layers():
        positions, channels = (size // layer.factor) ** 2, layer.channels
        if isinstance(layer, Transformer):
            linear += LINEAR_OF_TRANSFORMER * positions * channels**2 + 2 * keys * context * channels
            self_attention += 2 * positions**2 * channels
            cross_attention += 2 * positions * keys * channels
            continue
        convolution += positions * layer.multiply_adds
        if isinstance(layer, Residual):
            linear += width * channels
    return MultiplyAdds(convolution, linear, self_attention, cross_attention)


def training_flops(architecture: UNetArchitecture) -> float:
    """Return the model FLOPs of training on one sample: 2 per multiply-add, and twice as many backward as forward."""
    return 6.0 * multiply_adds(architecture).total
