"""BERT's own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from common.optim.adaptive import SMALLEST_EPSILON
from common.ranges import require

LARGEST = 32_767
"""Id or position that the prepared format, of 16-bit integers, holds."""


@dataclass(frozen=True)
class Facts:
    """What the rules fix beside the target: the model, and the form of a sample.

    Attributes:
        vocabulary: WordPieces.
        hidden, layers, heads, feed_forward: size of the encoder.
        max_sequence_length: tokens of the longest sequence, and of a row of packed sequences.
        segment_types: kinds of segments (sentence A, sentence B).
        norm_epsilon: inside the square root of every LayerNorm.
        dropout: probability at every place but the attention's probabilities.
        attention_dropout: probability there.
        initializer_range: standard deviation of initial weights, cut off at two of them.
        max_masked_per_sequence: masked tokens of one sequence at most.
        max_masked_per_row: masked tokens of one row of packed sequences at most, rounded up.
        sequences_per_pack: samples that a row of packed sequences counts as.
        max_sequences_per_pack: sequences that it holds at most.
        max_grad_norm: the gradient is clipped to it.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    feed_forward: int
    max_sequence_length: int
    segment_types: int
    norm_epsilon: float
    dropout: float
    attention_dropout: float
    initializer_range: float
    max_masked_per_sequence: int
    max_masked_per_row: int
    sequences_per_pack: int
    max_sequences_per_pack: int
    max_grad_norm: float

    def __post_init__(self) -> None:
        positive = {
            name: (getattr(self, name) >= 1, "at least 1")
            for name in (
                "heads",
                "layers",
                "feed_forward",
                "segment_types",
                "max_masked_per_sequence",
                "max_masked_per_row",
                "sequences_per_pack",
                "max_sequences_per_pack",
            )
        }
        fits = f"the prepared format holds ids and positions up to {LARGEST}"
        require(
            "benchmark.facts",
            self,
            **positive,
            vocabulary=(1 <= self.vocabulary <= LARGEST + 1, f"at least 1, and {fits}"),
            max_sequence_length=(1 <= self.max_sequence_length <= LARGEST, f"at least 1, and {fits}"),
            hidden=(
                self.hidden >= 1 and self.hidden % max(self.heads, 1) == 0,
                f"a positive multiple of heads={self.heads}",
            ),
            dropout=(0 <= self.dropout < 1, "a probability below 1"),
            attention_dropout=(0 <= self.attention_dropout < 1, "a probability below 1"),
            norm_epsilon=(0 < self.norm_epsilon < math.inf, "positive and finite"),
            initializer_range=(0 < self.initializer_range < math.inf, "positive and finite"),
            max_grad_norm=(0 < self.max_grad_norm < math.inf, "positive and finite"),
        )


@dataclass(frozen=True)
class Hparams:
    """The tunable hyperparameters: the rows of the rules' table for ``bert``.

    Attributes:
        source: where the set was published.
        global_batch_size: sequences of one optimizer step.
        training_steps: N of the learning rate, and the last step of a run.
        warmup_steps, start_warmup_step: W and S of the learning rate.
        variant: of the learning rate's counting: ``nvidia`` counts from 1 where ``start_warmup_step`` is not 0.
        clip: the gradient is clipped ``before_reduction``, that of each micro-batch by its own norm, or
            ``after_reduction``, the mean over all of them by its norm. The rules allow both.
    """

    source: str
    global_batch_size: int
    optimizer: Literal["lamb"]
    variant: Literal["nvidia", "reference"]
    base_learning_rate: float
    training_steps: int
    warmup_steps: int
    start_warmup_step: int
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    clip: Literal["before_reduction", "after_reduction"]

    def __post_init__(self) -> None:
        require(
            "hparams",
            self,
            base_learning_rate=(0 < self.base_learning_rate < math.inf, "positive and finite"),
            training_steps=(self.training_steps >= 1, "at least 1"),
            warmup_steps=(self.warmup_steps >= 0, "not negative"),
            start_warmup_step=(self.start_warmup_step <= 0, "0 or below: the steps that the warm-up has done already"),
            beta_1=(0 <= self.beta_1 < 1, "at least 0 and below 1"),
            beta_2=(0 <= self.beta_2 < 1, "at least 0 and below 1"),
            epsilon=(SMALLEST_EPSILON <= self.epsilon < math.inf, f"finite and at least {SMALLEST_EPSILON:.2g}"),
            weight_decay=(0 <= self.weight_decay < math.inf, "finite and not negative"),
        )


@dataclass(frozen=True)
class ModelConfig:
    """Where the weights come from, and how the operations run.

    Attributes:
        initial_checkpoint: name in ``assets_dir`` of the weights that the rules start from: a TensorFlow checkpoint's
            prefix, or a file that ends in ``.pt``. Without ``assets_dir`` the weights are drawn.
        attention, dropout, dropout_add_norm, bias_gelu, cross_entropy, linear: implementation of each operation.
        loss_scale: initial loss scale with fp16.
    """

    initial_checkpoint: str
    attention: str
    dropout: str
    dropout_add_norm: str
    bias_gelu: str
    cross_entropy: str
    linear: str
    loss_scale: float

    def __post_init__(self) -> None:
        require("model", self, loss_scale=(0 < self.loss_scale < math.inf, "positive and finite"))


@dataclass(frozen=True)
class ReaderConfig:
    """How sequences are read.

    Attributes:
        format: ``packed``: rows of one to three sequences; ``unpacked``: one sequence a row.
        compact: all tokens of a micro-batch back to back, padding at its end; otherwise every sequence starts a row
            of its own, as in the reference (``unpacked`` only).
        order: of the rows in a shard: ``shuffled``, or ``balanced``: so that all ranks hold equally many sequences.
        graph_per_count: one captured graph for each number of sequences; for the smallest micro-batches.
        eval_rows: capacity of an evaluation batch on one rank, in rows of ``max_sequence_length`` tokens.
    """

    format: Literal["packed", "unpacked"]
    compact: bool
    order: Literal["shuffled", "balanced"]
    graph_per_count: bool
    eval_rows: int

    def __post_init__(self) -> None:
        require(
            "reader",
            self,
            eval_rows=(self.eval_rows >= 1, "at least 1"),
            compact=(
                self.compact or self.format == "unpacked",
                "only unpacked sequences have rows of their own; give reader.format=unpacked as well",
            ),
            order=(
                self.order == "shuffled" or self.format == "packed",
                "only packed rows can be balanced; give reader.order=shuffled as well",
            ),
        )


@dataclass(frozen=True)
class BertConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
