"""Configuration that is specific to Llama 3.1 8B."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from common.config.ranges import AtLeast, NotNegative, Positive, Probability
from common.errors import ConfigError
from common.nn.decoder import DecoderArchitecture
from common.nn.decoder_operations import DECODER_OPERATIONS
from common.ops.cross_entropy import CROSS_ENTROPY
from common.ops.operation import AUTO, Operation, all_implementations
from common.ops.rope import RopeScaling
from common.ops.weight_gradient import WEIGHT_GRADIENT
from common.optim.hparams import AdamWHparams

OPERATIONS: dict[str, Operation] = {
    **DECODER_OPERATIONS,
    "cross_entropy": CROSS_ENTROPY,
    "accumulation": WEIGHT_GRADIENT,
}
"""Operations that ``model.implementations`` can configure.

``accumulation`` adds the weight gradient of FP8 operands to the sum of earlier micro-batches.
"""

ON_THE_RESIDUAL_STREAM = ("output.weight", "down.weight")
"""Ends of the names of weights whose products are added to the residual stream."""


@dataclass(frozen=True)
class Facts(DecoderArchitecture):
    """Sizes of network and samples, and the end of the schedule, which the rules fix.

    Attributes:
        rope_factor, rope_slow_turns, rope_fast_turns, rope_original_context: see
            :class:`common.ops.rope.RopeScaling`.
        row_length: tokens in a row, which is a sample, without the label of the last token.
        max_grad_norm: gradients are clipped to this norm.
        max_steps: steps of warm-up and cosine together.
        end_learning_rate_share: final learning rate of the cosine, as a fraction of the base learning rate.
        learning_rate_schedule: name of the schedule in the rules.
    """

    rope_factor: Annotated[float, Positive]
    rope_slow_turns: Annotated[float, Positive]
    rope_fast_turns: Annotated[float, Positive]
    rope_original_context: Annotated[int, AtLeast(1)]
    row_length: Annotated[int, AtLeast(2)]
    max_grad_norm: Annotated[float, Positive]
    max_steps: Annotated[int, AtLeast(1)]
    end_learning_rate_share: Annotated[float, Probability]
    learning_rate_schedule: Literal["cosine with linear warmup"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_slow_turns >= self.rope_fast_turns:
            raise ConfigError(
                f"rope_slow_turns={self.rope_slow_turns}: fewer than rope_fast_turns={self.rope_fast_turns}"
            )

    @property
    def rope_scaling(self) -> RopeScaling:
        """Scaling of the rotary frequencies."""
        return RopeScaling(self.rope_factor, self.rope_slow_turns, self.rope_fast_turns, self.rope_original_context)

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of a weight.

        For weights whose products are added to the residual stream, it is divided by the square root of the number of
        such additions (Radford et al. (GPT-2), section 2.3; ``scaled_init_method_normal`` in Megatron-Core).
        """
        additions = 2 * self.layers if name.endswith(ON_THE_RESIDUAL_STREAM) else 1
        return self.initializer_range / additions**0.5


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """Tunable hyperparameters, as listed in the rules.

    Attributes:
        warmup_steps: number of steps in which the learning rate rises.
    """

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Implementations of the network.

    Attributes:
        layers: number of layers to use, for benchmarks; 0 for all.
        blocks: ``written`` has hand-written backward passes with planned memory; ``autograd`` uses PyTorch operations
            and autograd.
        linear: matrix products of the blocks: ``torch``, or ``fp8``, which needs ``blocks=written``.
        recomputed_gate_up: number of layers that recompute the first product of the MLP in the backward pass; ``auto``:
            as few as memory requires. Needs ``blocks=written``.
        transposed_layers: number of first layers that keep transposed copies of their FP8 weights during a step; the
            other layers transpose them in every micro-batch.
        head_chunk: number of tokens whose logits exist at the same time.
        loss_scale: initial loss scale with fp16.
        token_products: how tokens move during the products of ``layout.tp``: ``symmetric_memory``, ``collective``, or
            ``auto``. Needs ``blocks=written``.
        implementations: implementation of each operation, by the operation's name; default ``auto``.
    """

    layers: Annotated[int, NotNegative]
    blocks: Literal["written", "autograd"]
    linear: Literal["torch", "fp8"]
    head_chunk: Annotated[int, AtLeast(1)]
    loss_scale: Annotated[float, Positive]
    recomputed_gate_up: Annotated[int, NotNegative] | Literal["auto"] = "auto"
    transposed_layers: Annotated[int, NotNegative] = 0
    token_products: str = AUTO
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))
        accumulation = self.implementations["accumulation"]
        if self.linear == "torch" and (self.transposed_layers or accumulation != AUTO):
            raise ConfigError(
                f"transposed_layers={self.transposed_layers}, implementations.accumulation={accumulation}: these are "
                "of FP8 products; give model.linear=fp8 as well"
            )
        if self.blocks == "written":
            return
        if self.linear != "torch":
            raise ConfigError(
                f"linear={self.linear}: only written blocks multiply in FP8; give model.blocks=written as well"
            )
        if self.recomputed_gate_up not in (0, AUTO):
            raise ConfigError(
                f"recomputed_gate_up={self.recomputed_gate_up}: only written blocks compute anything again; "
                "give model.blocks=written as well"
            )
        if self.token_products != AUTO:
            raise ConfigError(
                f"token_products={self.token_products}: only written blocks choose how tokens move; "
                "give model.blocks=written as well"
            )


@dataclass(frozen=True)
class ReaderConfig:
    """Options of the data reader.

    Attributes:
        eval_rows: rows in an evaluation batch on one rank.
        index_rows: number of training rows in the shuffled order. Another number gives another order.
    """

    eval_rows: Annotated[int, AtLeast(1)]
    index_rows: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class LlamaConfig:
    """Llama 3.1 8B's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig


@dataclass(frozen=True)
class RowFacts:
    """Constants of the data that the reader needs.

    Attributes:
        vocabulary: exclusive upper bound of tokens.
        row_length: tokens per row, without the label of the last token.
        eval_rows: size of the evaluation set: the first rows in the order of the file.
        index_rows: see :class:`ReaderConfig`.
    """

    vocabulary: int
    row_length: int
    eval_rows: int
    index_rows: int
