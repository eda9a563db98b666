"""Sizes of the network, and numbers derived from them: parameters, padding, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast, Positive
from common.errors import ConfigError

WORDS_PER_RANK = 128
"""The number of words per rank of tp is padded to a multiple of this."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a GPT-3 network (Brown et al., arXiv:2005.14165, table 2.1).

    Attributes:
        vocabulary: words without padding.
        hidden: E.
        heads: attention heads, a divisor of E.
        feed_forward: F.
        positions: number of learned positions, the maximum tokens in a row.
        norm_epsilon: added to the variance in every norm.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ConfigError: ``heads`` does not divide E.
    """

    vocabulary: Annotated[int, AtLeast(1)]
    hidden: Annotated[int, AtLeast(1)]
    layers: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    feed_forward: Annotated[int, AtLeast(1)]
    positions: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, Positive]
    initializer_range: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"heads={self.heads}: a divisor of hidden={self.hidden}")

    @property
    def head_size(self) -> int:
        """D, the size of one head."""
        return self.hidden // self.heads

    @property
    def products_per_layer(self) -> int:
        """Number of weights in the matrix products of one block: QKV, output, up and down."""
        return self.hidden * (4 * self.hidden + 2 * self.feed_forward)

    @property
    def parameters_per_layer(self) -> int:
        """Number of all parameters of one block, with biases and two norms."""
        biases = 3 * self.hidden + self.hidden + self.feed_forward + self.hidden
        return self.products_per_layer + biases + 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters without padding. The head shares the weight of the embedding."""
        ends = (self.vocabulary + self.positions) * self.hidden + 2 * self.hidden
        return self.layers * self.parameters_per_layer + ends

    def padded_vocabulary(self, ranks: int) -> int:
        """Return the rows of the embedding table, with padding, if ``ranks`` ranks share it."""
        step = WORDS_PER_RANK * ranks
        return -(-self.vocabulary // step) * step

    def forward_flops(self, length: int, causal: bool = True) -> float:
        """Return the FLOPs (2 per multiply-add) of the forward pass of one row, with the head.

        Args:
            length: tokens of the row.
            causal: count only the needed half of the attention; otherwise all of it, as NVIDIA and Megatron-LM do.
        """
        return self.layers * self.layer_flops(length, causal) + 2.0 * self.vocabulary * self.hidden * length

    def layer_flops(self, length: int, causal: bool = True) -> float:
        """Return the FLOPs of the forward pass of one row through one block; see :meth:`forward_flops`."""
        attention = (2.0 if causal else 4.0) * length * length * self.hidden
        return 2.0 * self.products_per_layer * length + attention
