"""Sizes and kinds of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.config.ranges import AtLeast, Positive
from common.errors import ConfigError
from common.language.architecture import GELU_MLP, LAYER_1P, Activation, Architecture, NormKind


@dataclass(frozen=True)
class GptArchitecture(Architecture):
    """Sizes of a GPT-3 network (Brown et al., arXiv:2005.14165, table 2.1).

    Pre-norm blocks with biases, an MLP with tanh GELU, learned positions, and a head that shares the weight of the
    embedding (Radford et al. 2019). Norms multiply by 1 + weight. Attention is dense in all layers.

    Attributes:
        vocabulary: words without padding.
        heads: attention heads, a divisor of E.
        positions: number of learned positions, the maximum tokens in a row.

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

    norm: ClassVar[NormKind] = LAYER_1P
    activation: ClassVar[Activation] = GELU_MLP
    rotary: ClassVar[bool] = False
    biases: ClassVar[bool] = True
    tied_head: ClassVar[bool] = True
    words_per_rank: ClassVar[int] = 128

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"heads={self.heads}: a divisor of hidden={self.hidden}")

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        """K, the number of heads."""
        return self.heads

    @property
    def head_size(self) -> int:  # type: ignore[override]
        """D, the size of one head."""
        return self.hidden // self.heads
