"""Multiply-adds of the U-Net per sample, by kind of operation."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.stable_diffusion.architecture import Architecture, Residual, Transformer

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


def multiply_adds(architecture: Architecture) -> MultiplyAdds:
    """Return the multiply-adds of the forward pass of one sample of ``latent_size`` and ``context_length``.

    Upsampling counts by its definition: a 3x3 convolution at the larger size.
    """
    size, keys = architecture.latent_size, architecture.context_length
    width, context = architecture.time_width, architecture.context_width
    convolution = 9 * size**2 * architecture.model_channels * architecture.latent_channels  # the last one
    linear = width * (architecture.model_channels + width)
    self_attention = cross_attention = 0
    for layer in architecture.layers():
        places, channels = (size // layer.factor) ** 2, layer.channels
        if isinstance(layer, Transformer):
            linear += LINEAR_OF_TRANSFORMER * places * channels**2 + 2 * keys * context * channels
            self_attention += 2 * places**2 * channels
            cross_attention += 2 * places * keys * channels
            continue
        convolution += places * layer.multiply_adds
        if isinstance(layer, Residual):
            linear += width * channels
    return MultiplyAdds(convolution, linear, self_attention, cross_attention)


def training_flops(architecture: Architecture) -> float:
    """Return the model FLOPs of training on one sample: 2 per multiply-add, and twice as many backward as forward."""
    return 6.0 * multiply_adds(architecture).total
