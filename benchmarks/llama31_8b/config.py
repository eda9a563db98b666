"""Llama 3.1 8B's own configuration."""

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
"""Operations that ``model.implementations`` can choose an implementation of.

``accumulation`` adds a weight's gradient of FP8 operands to the sum of earlier micro-batches.
"""

ON_THE_RESIDUAL_STREAM = ("output.weight", "down.weight")
"""Ends of the names of the weights whose results are added to the residual stream."""


@dataclass(frozen=True)
class Facts(DecoderArchitecture):
    """What the rules fix beside the target: the network, the form of a sample, and the end of the schedule.

    Attributes:
        rope_factor, rope_slow_turns, rope_fast_turns, rope_original_context: see
            :class:`common.ops.rope.RopeScaling`.
        row_length: tokens of a row, which is a sample, beside the last one's label.
        max_grad_norm: the gradient is clipped to it.
        max_steps: of warm-up and cosine together.
        end_learning_rate_share: of the base learning rate, at the end of the cosine.
        learning_rate_schedule: as the rules name it.
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
        """How the rotation's frequencies are scaled."""
        return RopeScaling(self.rope_factor, self.rope_slow_turns, self.rope_fast_turns, self.rope_original_context)

    def initial_std(self, name: str) -> float:
        """Weights that add to the residual stream are drawn smaller, by the root of how many add to it.

        Radford et al. (GPT-2), section 2.3; Megatron-Core's ``scaled_init_method_normal``.
        """
        additions = 2 * self.layers if name.endswith(ON_THE_RESIDUAL_STREAM) else 1
        return self.initializer_range / additions**0.5


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The tunable hyperparameters: the rows of the rules' table.

    Attributes:
        warmup_steps: in which the learning rate rises.
    """

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How the network runs.

    Attributes:
        layers: of the network that are used, for benches; 0 for all.
        blocks: ``written``: halves with their backward passes written out, and planned memory; ``autograd``: PyTorch's
            operations and autograd.
        linear: of the blocks' products: ``torch``, or ``fp8`` with ``blocks=written`` only.
        recomputed_gate_up: so many layers compute the MLP's first product again in the backward pass; ``auto``: as many
            as memory asks for, with ``blocks=written`` only.
        transposed_layers: the first so many layers keep their FP8 weights transposed for a step, too, which else are
            turned in every micro-batch.
        head_chunk: tokens whose logits are there at a time.
        loss_scale: initial loss scale with fp16.
        token_products: how tokens move beside the products of ``layout.tp``: ``symmetric_memory``, ``collective``, or
            ``auto``; with ``blocks=written`` only.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
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
    """How rows are read.

    Attributes:
        eval_rows: of an evaluation batch on one rank.
        index_rows: training rows that the order is made for; it is another order for another number.
    """

    eval_rows: Annotated[int, AtLeast(1)]
    index_rows: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class LlamaConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig


@dataclass(frozen=True)
class RowFacts:
    """What the reader needs to know of rows.

    Attributes:
        vocabulary: every token is below it.
        row_length: tokens of a row without the last one's label.
        eval_rows: the evaluation set: the first so many rows, in the order of the file.
        index_rows: see :class:`ReaderConfig`.
    """

    vocabulary: int
    row_length: int
    eval_rows: int
    index_rows: int
