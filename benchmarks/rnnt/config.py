"""Configuration dataclasses of RNN-T."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.rnnt.data_settings import AudioFacts, ReaderConfig
from benchmarks.rnnt.ops.features import FEATURES
from benchmarks.rnnt.ops.joint import JOINT
from benchmarks.rnnt.ops.lstm import LSTM
from benchmarks.rnnt.ops.transducer_loss import TRANSDUCER_LOSS
from common.config.ranges import (
    AtLeast,
    Decay,
    Finite,
    NotNegative,
    Positive,
    ProbabilityBelowOne,
    Range,
    ShareAboveZero,
)
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.ops.operation import Operation
from common.optim.hparams import LambHparams

Norm = Range("positive; inf for none", lambda value: 0 < value <= math.inf)

OPERATIONS: dict[str, Operation] = {
    "lstm": LSTM,
    "joint": JOINT,
    "transducer_loss": TRANSDUCER_LOSS,
    "audio": FEATURES,
}
"""Operations whose implementation ``model.implementations`` selects."""


@dataclass(frozen=True)
class Facts(AudioFacts):
    """Constants that the rules fix: audio features, network and decoding.

    Attributes:
        classes: number of tokens plus one for blank, which is the last class.
        encoder_width, pre_layers, post_layers: width and layers of the encoder's LSTMs, before and after pairs of
            frames are joined.
        prediction_width, prediction_layers: width of the prediction network's embedding and LSTM, and its layers.
        joint_width: width of the joint network's hidden layer.
        encoder_dropout, prediction_dropout, joint_dropout: dropout probabilities after every layer of the LSTMs,
            including the last, and before the last layer of the joint network.
        forget_bias: initial value of the forget gates' ``bias_ih``, before all LSTM parameters are scaled.
        hidden_bias_scale: factor of the drawn ``bias_hh`` of the forget gates.
        max_frame_symbols, max_symbols: maximum tokens per frame, after which decoding moves to the next frame, and
            maximum tokens per utterance.
        learning_rate_min: lower bound of the decaying learning rate.
    """

    classes: Annotated[int, AtLeast(2)]
    encoder_width: Annotated[int, AtLeast(1)]
    pre_layers: Annotated[int, AtLeast(1)]
    post_layers: Annotated[int, AtLeast(1)]
    prediction_width: Annotated[int, AtLeast(1)]
    prediction_layers: Annotated[int, AtLeast(1)]
    joint_width: Annotated[int, AtLeast(1)]
    encoder_dropout: Annotated[float, ProbabilityBelowOne]
    prediction_dropout: Annotated[float, ProbabilityBelowOne]
    joint_dropout: Annotated[float, ProbabilityBelowOne]
    forget_bias: Annotated[float, Finite]
    hidden_bias_scale: Annotated[float, Finite]
    max_frame_symbols: Annotated[int, AtLeast(1)]
    max_symbols: Annotated[int, AtLeast(1)]
    learning_rate_min: Annotated[float, NotNegative]

    @property
    def blank(self) -> int:
        """Index of the blank, which is the last class."""
        return self.classes - 1

    @property
    def features(self) -> int:
        """Features of a spliced frame, without padding."""
        return self.mel_filters * self.splice


@dataclass(frozen=True)
class Hparams(LambHparams):
    """Tunable hyperparameters: the rows of the table for ``rnnt`` in the rules.

    Attributes:
        warmup_epochs, hold_epochs: epochs of warm-up, and of constant learning rate after it.
        decay_per_epoch: factor of the learning rate per epoch after that.
        clip_norm: maximum norm of the gradient; infinite: no clipping.
        ema: decay of the moving average of the weights per step.
        init_scale: factor of an LSTM's drawn weights and biases.
        max_duration: maximum duration of a training utterance as recorded, in seconds.
        num_buckets: buckets of utterances of similar length from which batches are drawn; 1 is a plain shuffle.
    """

    optimizer: Literal["lamb"]
    warmup_epochs: Annotated[int, NotNegative]
    hold_epochs: Annotated[int, NotNegative]
    decay_per_epoch: Annotated[float, ShareAboveZero]
    clip_norm: Annotated[float, Norm]
    ema: Annotated[float, Decay]
    init_scale: Annotated[float, Positive]
    max_duration: Annotated[float, Positive]
    num_buckets: Annotated[int, AtLeast(1)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Recipe options of the network.

    Attributes:
        features: features of a frame with zero padding, for kernels that need a multiple.
        batch_split: number of parts of a micro-batch's rows that joint network and loss process one after another, to
            save memory.
        examples: lengths of synthetic utterances, for example in ``bench``: ``real`` or ``average`` for all.
    """

    operations = OPERATIONS
    features: Annotated[int, AtLeast(1)]
    batch_split: Annotated[int, AtLeast(1)] = 1
    examples: Literal["real", "average"] = "real"


@dataclass(frozen=True)
class RnntConfig:
    """RNN-T's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig

    def __post_init__(self) -> None:
        if self.model.features < self.facts.features:
            raise ConfigError(
                f"model.features={self.model.features}: a frame has {self.facts.features}, and can only be padded"
            )
