"""GPT-3's own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.gpt3.architecture import Architecture
from benchmarks.gpt3.operations import BLOCK_OPERATIONS
from common.config.ranges import AtLeast, NotNegative, Positive, Probability
from common.errors import ConfigError
from common.ops.operation import AUTO, Operation, all_implementations
from common.ops.weight_gradient import WEIGHT_GRADIENT
from common.optim.hparams import AdamWHparams

OPERATIONS: dict[str, Operation] = {**BLOCK_OPERATIONS, "accumulation": WEIGHT_GRADIENT}
"""Operations that ``model.implementations`` can choose an implementation of, for written blocks.

``accumulation`` adds a weight's gradient of FP8 operands to the sum of earlier micro-batches.
"""


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: network, form of a sample, schedule, and where the training begins.

    Attributes:
        eval_rows: rows of the evaluation set; of the last one its tokens alone are scored.
        max_grad_norm: the gradient is clipped to it.
        end_learning_rate_share: of the base learning rate, at the end of the cosine.
        learning_rate_schedule: as the rules name it.
        warmup_samples, decay_samples: at which the learning rate's warm-up and its cosine end, counted from the first
            training, of which the checkpoint is.
        checkpoint_samples: rows that the checkpoint was trained on; 0 for a training from random weights.
        checkpoint_steps: updates that made it.
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
        """Tokens of a row, which is a sample: one for each position."""
        return self.positions

    def steps(self, samples: int, global_batch: int) -> int:
        """The first step at which so many samples are done."""
        return math.ceil(samples / global_batch)

    def consumed(self, global_batch: int) -> int:
        """Rows before the first one of this training, in whole batches, as NVIDIA's submissions count them."""
        return self.steps(self.checkpoint_samples, global_batch) * global_batch


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The tunable hyperparameters: the rows of the rules' table, whose ``adam`` decays apart, as AdamW does."""

    optimizer: Literal["adam"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the training begins, and how the network runs.

    Attributes:
        checkpoint: folder in ``assets_dir`` with the published checkpoint; None for the only one in ``assets_dir`` or
            below it. Without ``assets_dir`` training starts from random weights.
        layers: of the network that are used, for benches; 0 for all.
        chunks: parts of the network on every stage of ``layout.pp``.
        blocks: ``written``: halves with their backward passes written out; ``autograd``: PyTorch's operations and
            autograd.
        linear: of the blocks' products: ``torch``, or ``fp8`` with ``blocks=written`` only.
        head_chunk: tokens whose logits are there at a time.
        loss_scale: initial loss scale with fp16.
        put_off_head: so many micro-batches of a step leave the gradient of the head's weight to the end of the passes,
            when the last stage would only wait; where there are several, with ``blocks=written`` only.
        token_products: how tokens move beside the products of ``layout.tp``: ``symmetric_memory``, ``collective``, or
            ``auto``; with ``blocks=written`` only.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    checkpoint: str | None
    layers: Annotated[int, NotNegative]
    chunks: Annotated[int, AtLeast(1)]
    blocks: Literal["written", "autograd"]
    linear: Literal["torch", "fp8"]
    head_chunk: Annotated[int, AtLeast(1)]
    loss_scale: Annotated[float, Positive]
    put_off_head: Annotated[int, NotNegative] = 0
    token_products: str = AUTO
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))
        accumulation = self.implementations["accumulation"]
        if self.linear == "torch" and accumulation != AUTO:
            raise ConfigError(
                f"implementations.accumulation={accumulation}: this applies to FP8 products only; set model.linear=fp8"
            )
        if self.blocks == "written":
            return
        if self.linear != "torch":
            raise ConfigError(
                f"linear={self.linear}: only written blocks multiply in FP8; give model.blocks=written as well"
            )
        if self.put_off_head:
            raise ConfigError(
                f"put_off_head={self.put_off_head}: only written blocks put anything off; "
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
        eval_rows: of a micro-batch of the evaluation on one rank.
        eval_micro_batches: that pass through the stages of ``layout.pp`` together.
        index_rows: training rows that the order is made for, those before the checkpoint too; it is another order for
            another number.
    """

    eval_rows: Annotated[int, AtLeast(1)]
    eval_micro_batches: Annotated[int, AtLeast(1)]
    index_rows: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class GptConfig:
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
        row_length: tokens of a row.
        eval_rows: the evaluation set: the first so many rows, in the order of the file.
        eval_tokens: labels of these.
        index_rows: see :class:`ReaderConfig`.
        consumed: of them that an earlier training has used.
    """

    vocabulary: int
    row_length: int
    eval_rows: int
    eval_tokens: int
    index_rows: int
    consumed: int
