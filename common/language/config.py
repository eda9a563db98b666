"""Configuration that all language models have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from common.config.ranges import AtLeast, NotNegative, Positive
from common.errors import ConfigError
from common.ops.operation import AUTO, Operation, all_implementations


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Implementations of the network; the base of the section ``model``.

    Attributes:
        layers: number of layers to use, for benchmarks; 0 for all.
        blocks: ``handwritten`` (``frozen`` for frozen weights) has hand-written backward passes; ``autograd`` uses
            PyTorch operations and autograd.
        linear: matrix products of the blocks: ``torch``, or ``fp8``, which needs hand-written backward passes.
        head_chunk: number of tokens whose logits exist at the same time.
        loss_scale: initial loss scale with fp16.
        token_products: how tokens move during the products of ``layout.tp``: ``symmetric_memory``, ``collective``, or
            ``auto``. Needs hand-written backward passes.
        implementations: implementation of each operation, by the operation's name; default ``auto``.
    """

    layers: Annotated[int, NotNegative]
    blocks: Literal["handwritten", "autograd"]
    linear: Literal["torch", "fp8"]
    head_chunk: Annotated[int, AtLeast(1)]
    loss_scale: Annotated[float, Positive]
    token_products: str = AUTO
    implementations: dict[str, str] = field(default_factory=dict)

    operations: ClassVar[Mapping[str, Operation]]
    """Operations that ``implementations`` can configure."""
    handwritten: ClassVar[str] = "handwritten"
    """Value of ``blocks`` for hand-written backward passes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, self.operations))
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
