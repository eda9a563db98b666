"""Configuration that all language models have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from common.config.ranges import AtLeast, NotNegative
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.ops.operation import AUTO


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(NetworkConfig):
    """Implementations of the network; the base of the section ``model``.

    Attributes:
        layers: number of layers to use, for benchmarks; 0 for all.
        blocks: ``handwritten`` (``frozen`` for frozen weights) has hand-written backward passes; ``autograd`` uses
            PyTorch operations and autograd.
        linear: matrix products of the blocks: ``torch``, or ``fp8``, which needs hand-written backward passes.
        head_chunk: number of tokens whose logits exist at the same time.
        token_products: how tokens move during the products of ``layout.tp``: ``symmetric_memory``, ``collective``, or
            ``auto``. Needs hand-written backward passes.
    """

    layers: Annotated[int, NotNegative]
    blocks: Literal["handwritten", "autograd"]
    linear: Literal["torch", "fp8"]
    head_chunk: Annotated[int, AtLeast(1)]
    token_products: str = AUTO

    handwritten: ClassVar[str] = "handwritten"
    """Value of ``blocks`` for hand-written backward passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear != "torch":
            self.need_handwritten("linear", self.linear, "multiply in FP8")
        if self.token_products != AUTO:
            self.need_handwritten("token_products", self.token_products, "choose how tokens move")
        accumulation = self.implementations.get("accumulation", AUTO)
        if self.linear == "torch" and accumulation != AUTO:
            raise ConfigError(
                f"implementations.accumulation={accumulation}: this applies to FP8 products only; set model.linear=fp8"
            )

    def need_handwritten(self, key: str, value: object, what: str) -> None:
        """Check an option that only hand-written backward passes have.

        Args:
            what: what these blocks do, for the message.

        Raises:
            ConfigError: the blocks run under autograd.
        """
        if self.blocks == "autograd":
            raise ConfigError(
                f"{key}={value}: only {self.handwritten} blocks {what}; give model.blocks={self.handwritten} as well"
            )
