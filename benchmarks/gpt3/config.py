"""Configuration that is specific to GPT-3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from common.config.ranges import AtLeast, NotNegative, Positive, Probability
from common.errors import ConfigError
from common.language.architecture import GELU_MLP, LAYER_1P, Activation, Architecture, NormKind, block_operations
from common.language.config import DecoderConfig
from common.ops.cross_entropy import OF_A_PART
from common.ops.operation import Operation
from common.ops.weight_gradient import WEIGHT_GRADIENT
from common.optim.hparams import AdamWHparams


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


OPERATIONS: dict[str, Operation] = {
    **block_operations(GptArchitecture),
    "cross_entropy": OF_A_PART,
    "accumulation": WEIGHT_GRADIENT,
}
"""Operations of the ``handwritten`` blocks and of the head that ``model.implementations`` can configure.

``accumulation`` adds the weight gradient of FP8 operands to the sum of earlier micro-batches.
"""


@dataclass(frozen=True)
class Facts(GptArchitecture):
    """Dataset constants, network sizes, schedule and starting point that the rules fix.

    Attributes:
        eval_rows: rows of the evaluation set; the last row may be shorter.
        max_grad_norm: gradients are clipped to this norm.
        end_learning_rate_share: final learning rate of the cosine, as a fraction of the base learning rate.
        learning_rate_schedule: name of the schedule in the rules.
        warmup_samples, decay_samples: samples at the end of warm-up and cosine, including those of the checkpoint.
        checkpoint_samples: rows that the checkpoint was trained on; 0 without a checkpoint.
    """

    eval_rows: Annotated[int, AtLeast(1)]
    max_grad_norm: Annotated[float, Positive]
    end_learning_rate_share: Annotated[float, Probability]
    learning_rate_schedule: Literal["cosine with linear warmup"]
    warmup_samples: Annotated[int, NotNegative]
    decay_samples: Annotated[int, AtLeast(1)]
    checkpoint_samples: Annotated[int, NotNegative]
    checkpoint_steps: Annotated[int, NotNegative]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_samples >= self.decay_samples:
            raise ConfigError(
                f"warmup_samples={self.warmup_samples}: not before decay_samples={self.decay_samples}, where the "
                "learning rate has fallen"
            )
        if (self.checkpoint_samples == 0) != (self.checkpoint_steps == 0):
            raise ConfigError(
                f"checkpoint_steps={self.checkpoint_steps} updates on checkpoint_samples={self.checkpoint_samples} "
                "rows: 0 with 0, without a checkpoint"
            )

    @property
    def row_length(self) -> int:
        """Tokens per row. A row is a sample and has a token for each position."""
        return self.positions

    def steps(self, samples: int, global_batch: int) -> int:
        """Return the smallest number of steps that process at least ``samples`` samples."""
        return math.ceil(samples / global_batch)

    def consumed(self, global_batch: int) -> int:
        """Return the rows of the checkpoint, rounded up to whole batches as in the submissions by NVIDIA."""
        return self.steps(self.checkpoint_samples, global_batch) * global_batch


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """Tunable hyperparameters, as listed in the rules; their ``adam`` uses decoupled weight decay, like AdamW."""

    optimizer: Literal["adam"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """Starting point, and implementations of the network.

    Attributes:
        checkpoint: folder in ``assets_dir`` with the published checkpoint; None for the only one in ``assets_dir`` or
            below it. Without ``assets_dir`` training starts from random weights.
        chunks: parts of the network on every stage of ``layout.pp``.
        put_off_head: number of micro-batches per step whose gradient of the head weight is computed at the end of the
            step, when the last stage would be idle. Only for several stages; needs ``blocks=handwritten``.
    """

    checkpoint: str | None
    chunks: Annotated[int, AtLeast(1)]
    put_off_head: Annotated[int, NotNegative] = 0

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.put_off_head:
            self.need_handwritten("put_off_head", self.put_off_head, "defer gradients")


@dataclass(frozen=True)
class ReaderConfig:
    """Options of the data reader.

    Attributes:
        eval_rows: rows of an evaluation micro-batch on one rank.
        eval_micro_batches: micro-batches that pass through the stages of ``layout.pp`` together.
        index_rows: number of training rows in the shuffled order, including those before the checkpoint. Another
            number gives another order.
    """

    eval_rows: Annotated[int, AtLeast(1)]
    eval_micro_batches: Annotated[int, AtLeast(1)]
    index_rows: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class GptConfig:
    """GPT-3's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
