"""BERT's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.bert.model import OPERATIONS, Architecture
from common.config.ranges import AtLeast, NotNegative, Positive, Range
from common.errors import ConfigError
from common.ops.operation import all_implementations
from common.optim.hparams import LambHparams

LARGEST = 32_767
"""Id or position that the prepared format, of 16-bit integers, holds."""

_FITS = f"at least 1, and the prepared format holds ids and positions up to {LARGEST}"
Vocabulary = Range(_FITS, lambda value: 1 <= value <= LARGEST + 1)
Positions = Range(_FITS, lambda value: 1 <= value <= LARGEST)
StepsDone = Range("0 or below: the steps that the warm-up has done already", lambda value: value <= 0)


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: the network, which takes them as they are, and the form of a sample.

    Attributes:
        vocabulary: WordPieces.
        max_sequence_length: tokens of the longest sequence, and of a row of packed sequences.
        max_masked_per_sequence: masked tokens of one sequence at most.
        max_masked_per_row: masked tokens of one row of packed sequences at most, rounded up.
        sequences_per_pack: samples that a row of packed sequences counts as.
        max_sequences_per_pack: sequences that it holds at most.
        max_grad_norm: the gradient is clipped to it.
    """

    vocabulary: Annotated[int, Vocabulary]
    max_sequence_length: Annotated[int, Positions]
    max_masked_per_sequence: Annotated[int, AtLeast(1)]
    max_masked_per_row: Annotated[int, AtLeast(1)]
    sequences_per_pack: Annotated[int, AtLeast(1)]
    max_sequences_per_pack: Annotated[int, AtLeast(1)]
    max_grad_norm: Annotated[float, Positive]


@dataclass(frozen=True)
class Hparams(LambHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``bert``; a sample is a sequence.

    Attributes:
        variant: of the learning rate's counting: ``nvidia`` counts from 1 where ``start_warmup_step`` is not 0.
        training_steps: N of the learning rate, and the last step of a run.
        warmup_steps, start_warmup_step: W and S of the learning rate.
        clip: the gradient is clipped ``before_reduction``, that of each micro-batch by its own norm, or
            ``after_reduction``, the mean over all of them by its norm. The rules allow both.
    """

    optimizer: Literal["lamb"]
    variant: Literal["nvidia", "reference"]
    training_steps: Annotated[int, AtLeast(1)]
    warmup_steps: Annotated[int, NotNegative]
    start_warmup_step: Annotated[int, StepsDone]
    clip: Literal["before_reduction", "after_reduction"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the weights come from, and how the operations run.

    Attributes:
        initial_checkpoint: name in ``assets_dir`` of the weights that the rules start from: a TensorFlow checkpoint's
            prefix, or a file that ends in ``.pt``. Without ``assets_dir`` the weights are drawn.
        loss_scale: initial loss scale with fp16.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    initial_checkpoint: str
    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class ReaderConfig:
    """How sequences are read.

    Attributes:
        format: ``packed``: rows of one to three sequences; ``unpacked``: one sequence a row.
        order: of the rows in a shard: ``shuffled``, or ``balanced``: so that all ranks hold equally many sequences.
        graph_per_count: one captured graph for each number of sequences; for the smallest micro-batches.
        eval_rows: capacity of an evaluation batch on one rank, in rows of ``max_sequence_length`` tokens.
    """

    format: Literal["packed", "unpacked"]
    order: Literal["shuffled", "balanced"]
    graph_per_count: bool
    eval_rows: Annotated[int, AtLeast(1)]

    def __post_init__(self) -> None:
        if self.order == "balanced" and self.format == "unpacked":
            raise ConfigError("order=balanced: only packed rows can be balanced; give reader.order=shuffled as well")


@dataclass(frozen=True)
class BertConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
