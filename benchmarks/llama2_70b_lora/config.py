"""Llama-2-70B LoRA's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from common.config.ranges import AtLeast, NotNegative, Positive, ProbabilityBelowOne
from common.errors import ConfigError
from common.nn.decoder import DecoderArchitecture
from common.nn.frozen_decoder.operations import FROZEN_DECODER_OPERATIONS as OPERATIONS
from common.nn.lora import LoraSettings
from common.ops.operation import AUTO, all_implementations
from common.optim.hparams import AdamWHparams


@dataclass(frozen=True)
class Facts(DecoderArchitecture):
    """What the rules fix beside the target: the network, its adapters and the form of a sample.

    Attributes:
        row_length: tokens of a packed row, which is a sample.
        lora_rank, lora_alpha, lora_dropout: see :class:`common.nn.lora.LoraSettings`.
        max_grad_norm: the gradient is clipped to it.
    """

    row_length: Annotated[int, AtLeast(2)]
    lora_rank: Annotated[int, AtLeast(1)]
    lora_alpha: Annotated[float, Positive]
    lora_dropout: Annotated[float, ProbabilityBelowOne]
    max_grad_norm: Annotated[float, Positive]

    @property
    def lora(self) -> LoraSettings:
        """The adapters."""
        return LoraSettings(self.lora_rank, self.lora_alpha, self.lora_dropout)


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The tunable hyperparameters: the rows of the rules' table; a sample is a packed row.

    Attributes:
        training_steps: of the cosine; the last step of a run, at the latest.
        warmup_ratio: share of them in which the learning rate rises.
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
        """Steps in which the learning rate rises."""
        return round(self.warmup_ratio * self.training_steps)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the weights come from, and how the operations run.

    Attributes:
        base: folder in ``assets_dir`` with the base's safetensors. Without ``assets_dir`` the weights are drawn.
        layers: of the base that are used, for benches; 0 for all.
        blocks: ``frozen``: halves with planned memory; ``autograd``: PyTorch's operations and autograd.
        linear: of the blocks' products: ``torch``, ``fp8``, or ``te``, FP8 by Transformer Engine; both with
            ``blocks=frozen`` only.
        recomputed_qkv: number of layers that recompute query, key and value in the backward pass; ``auto``: as few as
            memory requires. Needs ``blocks=frozen``.
        transposed_layers: number of layers that also keep their FP8 weights transposed; ``auto``: as many as memory
            allows.
        head_chunk: tokens whose logits are there at a time.
        loss_scale: initial loss scale with fp16.
        token_products: how tokens move beside the products of ``layout.tp``: ``symmetric_memory``, ``collective``, or
            ``auto``.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    base: str
    layers: Annotated[int, NotNegative]
    blocks: Literal["frozen", "autograd"]
    linear: Literal["torch", "fp8", "te"]
    head_chunk: Annotated[int, AtLeast(1)]
    loss_scale: Annotated[float, Positive]
    recomputed_qkv: Annotated[int, NotNegative] | Literal["auto"] = "auto"
    transposed_layers: Annotated[int, NotNegative] | Literal["auto"] = "auto"
    token_products: str = AUTO
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))
        if self.linear != "torch" and self.blocks != "frozen":
            raise ConfigError(
                f"linear={self.linear}: only frozen blocks multiply in FP8; give model.blocks=frozen as well"
            )
        if self.recomputed_qkv not in (0, AUTO) and self.blocks != "frozen":
            raise ConfigError(
                f"recomputed_qkv={self.recomputed_qkv}: only frozen blocks compute anything again; "
                "give model.blocks=frozen as well"
            )
        if self.transposed_layers not in (0, AUTO) and self.linear == "torch":
            raise ConfigError(
                f"transposed_layers={self.transposed_layers}: only FP8 weights are kept transposed; "
                "give model.linear=fp8 as well"
            )


@dataclass(frozen=True)
class ReaderConfig:
    """How rows are read.

    Attributes:
        eval_rows: of an evaluation batch on one rank.
    """

    eval_rows: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class LlamaConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
