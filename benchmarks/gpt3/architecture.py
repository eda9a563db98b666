"""The shape of the network, and what follows from it: weights, their padding, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast, Positive
from common.errors import ConfigError

WORDS_PER_RANK = 128
"""The ranks of tp have a multiple of so many words each."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a GPT-3 network (Brown et al., arXiv:2005.14165, table 2.1).

    Attributes:
        vocabulary: words, without those that only pad the table.
        hidden: E.
        layers: blocks.
        heads: of the attention, a divisor of E.
        feed_forward: F.
        positions: that are learned: the most tokens of a row.
        norm_epsilon: added to the variance in every norm.
        initializer_range: standard deviation of drawn weights.

    Raises:
        ConfigError: the heads do not divide E.
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
        """D."""
        return self.hidden // self.heads

    @property
    def products_per_layer(self) -> int:
        """Weights of the matrix products of a block: QKV, output, up and down."""
        return self.hidden * (4 * self.hidden + 2 * self.feed_forward)

    @property
    def parameters_per_layer(self) -> int:
        """All weights of a block: with biases and two norms."""
        biases = 3 * self.hidden + self.hidden + self.feed_forward + self.hidden
        return self.products_per_layer + biases + 4 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, the head being the embedding, without padding."""
        ends = (self.vocabulary + self.positions) * self.hidden + 2 * self.hidden
        return self.layers * self.parameters_per_layer + ends

    def padded_vocabulary(self, ranks: int) -> int:
        """Rows of the table of words where so many ranks share it."""
        step = WORDS_PER_RANK * ranks
        return -(-self.vocabulary // step) * step

    def forward_flops(self, length: int, causal: bool = True) -> float:
        """FLOPs (2 per multiply-add) of a row's forward pass, head included.

        Args:
            length: tokens of the row.
            causal: count only the half of the attention that is needed; else all of it, as NVIDIA's and Megatron-LM's
                figures do.
        """
        return self.layers * self.layer_flops(length, causal) + 2.0 * self.vocabulary * self.hidden * length

    def layer_flops(self, length: int, causal: bool = True) -> float:
        """Of these, those of one block."""
        attention = (2.0 if causal else 4.0) * length * length * self.hidden
        return 2.0 * self.products_per_layer * length + attention
