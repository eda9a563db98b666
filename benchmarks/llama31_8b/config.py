"""Configuration that is specific to Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from common.config.ranges import AtLeast, NotNegative, Positive, Probability
from common.errors import ConfigError
from common.language.architecture import LlamaArchitecture, block_operations
from common.language.config import DecoderConfig
from common.ops.cross_entropy import CROSS_ENTROPY
from common.ops.operation import AUTO, Operation
from common.ops.rope import RopeScaling
from common.ops.weight_gradient import WEIGHT_GRADIENT
from common.optim.hparams import AdamWHparams

OPERATIONS: dict[str, Operation] = {
    **block_operations(LlamaArchitecture),
    "cross_entropy": CROSS_ENTROPY,
    "accumulation": WEIGHT_GRADIENT,
}
"""Operations that ``model.implementations`` can configure.

``accumulation`` adds the weight gradient of FP8 operands to the sum of earlier micro-batches.
"""

ON_THE_RESIDUAL_STREAM = ("output.weight", "down.weight")
"""Ends of the names of weights whose products are added to the residual stream."""


@dataclass(frozen=True)
class Facts(LlamaArchitecture):
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
class ModelConfig(DecoderConfig):
    """Implementations of the network.

    Attributes:
        recomputed_gate_up: number of layers that recompute the first product of the MLP in the backward pass; ``auto``:
            as few as memory requires. Needs ``blocks=handwritten``.
        transposed_layers: number of first layers that keep transposed copies of their FP8 weights during a step; the
            other layers transpose them in every micro-batch.
    """

    recomputed_gate_up: Annotated[int, NotNegative] | Literal["auto"] = "auto"
    transposed_layers: Annotated[int, NotNegative] = 0

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear == "torch" and self.transposed_layers:
            raise ConfigError(
                f"transposed_layers={self.transposed_layers}: this applies to FP8 products only; set model.linear=fp8"
            )
        if self.recomputed_gate_up not in (0, AUTO):
            self.need_handwritten("recomputed_gate_up", self.recomputed_gate_up, "compute anything again")


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
