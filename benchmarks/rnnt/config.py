"""RNN-T's own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
    FiniteNotNegative,
    NotNegative,
    Positive,
    ProbabilityBelowOne,
    Range,
    ShareAboveZero,
)
from common.errors import ConfigError
from common.ops.operation import Operation, all_implementations
from common.optim.hparams import LambHparams

Norm = Range("positive; inf for none", lambda value: 0 < value <= math.inf)

OPERATIONS: dict[str, Operation] = {
    "lstm": LSTM,
    "joint": JOINT,
    "transducer_loss": TRANSDUCER_LOSS,
    "audio": FEATURES,
}
"""Operations whose implementation ``model.implementations`` can choose."""


@dataclass(frozen=True)
class Architecture:
    """The shape of the network.

    Attributes:
        classes: tokens and blank, which is the last.
        encoder_width, pre_layers, post_layers: of the encoder's LSTMs before and after two frames are joined to one.
        prediction_width, prediction_layers: of the prediction network's embedding and LSTM.
        joint_width: of the sum of both, before the last layer.
        encoder_dropout, prediction_dropout, joint_dropout: after every layer of an LSTM, the last too, and before the
            last layer of the joint network.
        forget_bias: that an LSTM's forget gates start with, before all of it is scaled.
        hidden_bias_scale: what the drawn bias of these gates of the hidden state is multiplied with.
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

    @property
    def blank(self) -> int:
        """The last class."""
        return self.classes - 1

    @property
    def features(self) -> int | None:
        """Features of a frame without padding; None where a frame is never padded."""
        return None


@dataclass(frozen=True)
class Facts(AudioFacts, Architecture):
    """What the rules fix beside the target: features, the network, which takes them as they are, and decoding.

    Attributes:
        max_frame_symbols, max_symbols: decoding goes on to the next frame after so many tokens of one, and ends after
            so many.
        learning_rate_min: the rate decays no further.
    """

    max_frame_symbols: Annotated[int, AtLeast(1)]
    max_symbols: Annotated[int, AtLeast(1)]
    learning_rate_min: Annotated[float, FiniteNotNegative]

    @property
    def features(self) -> int:
        """Of a spliced frame."""
        return self.mel_filters * self.splice


@dataclass(frozen=True)
class Hparams(LambHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``rnnt``.

    Attributes:
        warmup_epochs, hold_epochs: of the learning rate.
        decay_per_epoch: what the rate is multiplied with from one epoch to the next after that.
        clip_norm: the gradient is clipped to it; infinite for not at all.
        ema: how much of itself the average of the weights keeps at each step.
        init_scale: what an LSTM's weights and biases are multiplied with once they are drawn.
        max_duration: seconds of the longest training utterance, as it was recorded.
        num_buckets: groups of utterances of like length that batches are drawn from; 1 is a plain shuffle.
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


@dataclass(frozen=True)
class ModelConfig:
    """How the network is laid out, and how operations run.

    Attributes:
        features: of a frame with zeros behind the real ones, for kernels that want a multiple.
        loss_scale: initial loss scale with fp16.
        batch_split: joint network and loss run over so many parts of a micro-batch, one after another, which takes less
            memory.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
        examples: lengths of made-up utterances, such as ``bench`` measures the step with: ``real`` ones, or all
            ``average``.
    """

    features: Annotated[int, AtLeast(1)]
    loss_scale: Annotated[float, Positive]
    batch_split: Annotated[int, AtLeast(1)] = 1
    implementations: dict[str, str] = field(default_factory=dict)
    examples: Literal["real", "average"] = "real"

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class RnntConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig

    def __post_init__(self) -> None:
        if self.model.features < self.facts.features:
            raise ConfigError(
                f"model.features={self.model.features}: a frame has {self.facts.features}, and can only be padded"
            )
