"""Configuration that is specific to Llama-2-70B LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from common.config.ranges import AtLeast, NotNegative, Positive, ProbabilityBelowOne
from common.errors import ConfigError
from common.language.architecture import LlamaArchitecture, block_operations
from common.language.config import DecoderConfig
from common.language.lora import LoraSettings
from common.ops.operation import AUTO, Operation
from common.optim.hparams import AdamWHparams

OPERATIONS: dict[str, Operation] = block_operations(LlamaArchitecture, adapters=True)
"""Operations that ``model.implementations`` can configure."""


@dataclass(frozen=True)
class Facts(LlamaArchitecture):
    """Sizes of network, adapters and samples that the rules fix.

    Attributes:
        row_length: tokens in a packed row, which is a sample.
        max_grad_norm: gradients are clipped to this norm.
    """

    row_length: Annotated[int, AtLeast(2)]
    lora_rank: Annotated[int, AtLeast(1)]
    lora_alpha: Annotated[float, Positive]
    lora_dropout: Annotated[float, ProbabilityBelowOne]
    max_grad_norm: Annotated[float, Positive]

    @property
    def lora(self) -> LoraSettings:
        """Settings of the adapters."""
        return LoraSettings(self.lora_rank, self.lora_alpha, self.lora_dropout)


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """Tunable hyperparameters, as listed in the rules; a sample is a packed row.

    Attributes:
        training_steps: steps of the cosine schedule, and the last step of a run.
        warmup_ratio: fraction of ``training_steps`` in which the learning rate rises.
    """

    optimizer: Literal["adamw"]
    training_steps: Annotated[int, AtLeast(1)]
    warmup_ratio: Annotated[float, ProbabilityBelowOne]

    def __post_init__(self) -> None:
        if self.warmup_steps >= self.training_steps:
            raise ConfigError(
                f"warmup_ratio={self.warmup_ratio}: rounded to steps it is all of training_steps={self.training_steps}"
            )

    @property
    def warmup_steps(self) -> int:
        """Number of steps in which the learning rate rises."""
        return round(self.warmup_ratio * self.training_steps)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """Base weights, and implementations of the network.

    Attributes:
        base: folder in ``assets_dir`` with the safetensors of the base. Without ``assets_dir`` weights are random.
        linear: matrix products of the blocks: ``torch``, ``fp8``, or ``te`` for FP8 by Transformer Engine. The last
            two need ``blocks=frozen``.
        recomputed_qkv: number of layers that recompute query, key and value in the backward pass; ``auto``: as few as
            memory requires. Needs ``blocks=frozen``.
        transposed_layers: number of layers that also keep their FP8 weights transposed; ``auto``: as many as memory
            allows.
    """

    base: str
    blocks: Literal["frozen", "autograd"]  # type: ignore[assignment]
    linear: Literal["torch", "fp8", "te"]  # type: ignore[assignment]
    recomputed_qkv: Annotated[int, NotNegative] | Literal["auto"] = "auto"
    transposed_layers: Annotated[int, NotNegative] | Literal["auto"] = "auto"

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS
    handwritten: ClassVar[str] = "frozen"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recomputed_qkv not in (0, AUTO):
            self.need_handwritten("recomputed_qkv", self.recomputed_qkv, "compute anything again")
        if self.transposed_layers not in (0, AUTO) and self.linear == "torch":
            raise ConfigError(
                f"transposed_layers={self.transposed_layers}: only FP8 weights are kept transposed; "
                "give model.linear=fp8 as well"
            )


@dataclass(frozen=True)
class ReaderConfig:
    """Options of the data reader.

    Attributes:
        eval_rows: rows in an evaluation batch on one rank.
    """

    eval_rows: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class LoraConfig:
    """Llama-2-70B LoRA's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
