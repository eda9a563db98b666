"""Configuration that is specific to BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.bert.model import OPERATIONS, BertArchitecture
from common.config.ranges import AtLeast, NotNegative, Positive, Range
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.optim.hparams import LambHparams

LARGEST = 32_767
"""Largest id or position that fits the prepared format, which stores signed 16-bit integers."""

_FITS = f"at least 1, and the prepared format holds ids and positions up to {LARGEST}"
Vocabulary = Range(_FITS, lambda value: 1 <= value <= LARGEST + 1)
Positions = Range(_FITS, lambda value: 1 <= value <= LARGEST)
StepsDone = Range("0 or below: the steps that the warm-up has done already", lambda value: value <= 0)


@dataclass(frozen=True)
class Facts(BertArchitecture):
    """Dataset constants and network sizes that the rules fix.

    Attributes:
        vocabulary: number of WordPieces.
        max_sequence_length: tokens of the longest sequence, and of a row of packed sequences.
        max_masked_per_sequence: maximum number of masked tokens in one sequence.
        max_masked_per_row: maximum number of masked tokens in one row of packed sequences, rounded up.
        sequences_per_pack: nominal samples per row of packed sequences.
        max_sequences_per_pack: maximum number of sequences in one row.
        max_grad_norm: gradients are clipped to this norm.
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
    """Tunable hyperparameters, as listed for ``bert`` in the rules; a sample is a sequence.

    Attributes:
        variant: how the learning rate counts steps: ``nvidia`` counts from 1 if ``start_warmup_step`` is not 0.
        training_steps: N of the learning rate schedule, and the last step of a run.
        warmup_steps, start_warmup_step: W and S of the learning rate schedule.
        clip: ``before_reduction`` clips the gradient of each micro-batch by its own norm; ``after_reduction`` clips
            the mean gradient. The rules allow both.
    """

    optimizer: Literal["lamb"]
    variant: Literal["nvidia", "reference"]
    training_steps: Annotated[int, AtLeast(1)]
    warmup_steps: Annotated[int, NotNegative]
    start_warmup_step: Annotated[int, StepsDone]
    clip: Literal["before_reduction", "after_reduction"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Initial weights, loss scale, and implementations of the operations.

    Attributes:
        initial_checkpoint: checkpoint in ``assets_dir`` from which the rules start: the prefix of a TensorFlow
            checkpoint, or a file that ends in ``.pt``. Without ``assets_dir`` the initial weights are random.
    """

    operations = OPERATIONS
    initial_checkpoint: str


@dataclass(frozen=True)
class ReaderConfig:
    """Options of the data reader.

    Attributes:
        format: ``packed`` has one to three sequences per row; ``unpacked`` has one.
        order: order of the rows in a shard: ``shuffled``, or ``balanced``, where all ranks get equally many sequences.
        graph_per_count: capture one graph for each number of sequences; for the smallest micro-batches.
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
    """BERT's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
