"""Sizes of FLUX.1's transformer, and the FLOPs that follow from them.

Legend of the package: N samples, T text tokens and L image tokens of a sample, S = T + L, C hidden features, H heads,
D features of a head, F features of an MLP, P features of a packed latent (channels times patch), K features of an
encoded caption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast, Each, Positive
from common.errors import ConfigError


@dataclass(frozen=True)
class FluxArchitecture:
    """Sizes and constants of the network.

    Attributes:
        hidden: C, a multiple of ``heads``.
        heads: H.
        feed_forward: F.
        double_blocks: number of blocks in which text and image have their own weights.
        single_blocks: number of blocks in which they share weights.
        rope_axes: rotated features of a head for each axis of positions: index, row and column. Even numbers, D in sum.
        rope_theta: base of the frequencies of the rotation.
        time_features: sines and cosines of the time, an even number.
        time_period: longest period of these, in units of ``time / time_scale``.
        time_scale: factor on the time, which is in [0, 1].
        latent_channels: channels of a latent.
        latent_size: height and width of a latent, a multiple of ``patch``.
        patch: height and width of the part of a latent that becomes a token.
        text_length: T.
        text_width: K of an encoded token of the caption.
        caption_width: features of the whole encoded caption.
        norm_epsilon: number that every norm adds to the variance or the mean square.

    Raises:
        ConfigError: the sizes do not fit together.
    """

    hidden: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    feed_forward: Annotated[int, AtLeast(1)]
    double_blocks: Annotated[int, AtLeast(1)]
    single_blocks: Annotated[int, AtLeast(1)]
    rope_axes: Annotated[tuple[int, ...], Each(AtLeast(2))]
    rope_theta: Annotated[float, Positive]
    time_features: Annotated[int, AtLeast(2)]
    time_period: Annotated[float, Positive]
    time_scale: Annotated[float, Positive]
    latent_channels: Annotated[int, AtLeast(1)]
    latent_size: Annotated[int, AtLeast(1)]
    patch: Annotated[int, AtLeast(1)]
    text_length: Annotated[int, AtLeast(1)]
    text_width: Annotated[int, AtLeast(1)]
    caption_width: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"hidden={self.hidden}: a multiple of heads={self.heads}")
        if len(self.rope_axes) != 3 or sum(self.rope_axes) != self.head_size or any(n % 2 for n in self.rope_axes):
            raise ConfigError(
                f"rope_axes={list(self.rope_axes)}: three even numbers with the sum hidden / heads = {self.head_size}"
            )
        if self.time_features % 2:
            raise ConfigError(f"time_features={self.time_features}: an even number")
        if self.latent_size % self.patch:
            raise ConfigError(f"latent_size={self.latent_size}: a multiple of patch={self.patch}")

    @property
    def head_size(self) -> int:
        """D."""
        return self.hidden // self.heads

    @property
    def rows(self) -> int:
        """Rows, and columns, of image tokens."""
        return self.latent_size // self.patch

    @property
    def image_length(self) -> int:
        """L."""
        return self.rows**2

    @property
    def length(self) -> int:
        """S, the tokens of a sample."""
        return self.text_length + self.image_length

    @property
    def packed(self) -> int:
        """P."""
        return self.latent_channels * self.patch**2

    @property
    def stream_products(self) -> int:
        """Weights of the matrix products over tokens in a single block, or in one stream of a double block."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.feed_forward

    def multiply_adds(self) -> int:
        """Return the multiply-adds of the forward pass of one sample: matrix products and attention."""
        C, S = self.hidden, self.length
        attention = 2 * S * S * C
        double = S * self.stream_products + 2 * 6 * C * C + attention
        single = S * self.stream_products + 3 * C * C + attention
        vectors = (self.time_features + self.caption_width + 2 * C + 2 * C) * C
        outer = self.image_length * 2 * self.packed * C + self.text_length * self.text_width * C + vectors
        return self.double_blocks * double + self.single_blocks * single + outer

    def training_flops(self) -> float:
        """Return the model FLOPs of training on one sample: 2 per multiply-add, and twice as many backward."""
        return 6.0 * self.multiply_adds()
