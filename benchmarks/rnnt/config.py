"""RNN-T's own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import (
    AtLeast,
    Decay,
    Finite,
    FiniteNotNegative,
    NotNegative,
    Positive,
    ProbabilityBelowOne,
    Range,
    Share,
    ShareAboveZero,
)
from common.errors import ConfigError
from common.ops.implementation import AUTO
from common.optim.hparams import LambHparams

EvenFrames = Range("two frames are joined to one: an even number", lambda value: value >= 2 and value % 2 == 0)
Norm = Range("positive, .inf for none", lambda value: 0 < value <= math.inf)


@dataclass(frozen=True)
class Architecture:
    """The shape of the network.

    Attributes:
        mel_filters: features of a frame.
        splice: consecutive frames that are stacked to one before the network.
        classes: tokens and blank, which is the last.
        encoder_width, pre_layers, post_layers: of the encoder's LSTMs before and after two frames are joined to one.
        prediction_width, prediction_layers: of the prediction network's embedding and LSTM.
        joint_width: of the sum of both, before the last layer.
        encoder_dropout, prediction_dropout, joint_dropout: after every layer of an LSTM, the last too, and before the
            last layer of the joint network.
        forget_bias: that an LSTM's forget gates start with, before all of it is scaled.
        hidden_bias_scale: what the drawn bias of these gates of the hidden state is multiplied with.
    """

    mel_filters: Annotated[int, AtLeast(1)]
    splice: Annotated[int, AtLeast(1)]
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
    def features(self) -> int:
        """Of a spliced frame."""
        return self.mel_filters * self.splice

    @property
    def blank(self) -> int:
        """The last class."""
        return self.classes - 1


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: the network, which takes them as they are, features, decoding.

    Lengths in samples, frequencies in Hz.

    Attributes:
        sample_rate: of the audio.
        speed_min, speed_max: a training utterance is resampled to last between so many times as long.
        silence_db, silence_window, silence_reset: short-term power over ``silence_window`` samples, relative to the
            utterance's maximum, below which its ends are silence; the running sum is taken anew every
            ``silence_reset``.
        dither: deviation of the noise that is added.
        preemphasis: share of the sample before that is subtracted from each.
        fft, window, hop: of the spectrogram: length of the transform, of Hann's window in it, and from one frame to the
            next.
        mel_min, mel_max: what the mel filters cover.
        log_floor: smallest power of which the logarithm is taken.
        freq_masks, freq_mask_min, freq_mask_max: masks over features of an utterance, and their widths.
        time_masks, time_mask_min, time_mask_max: masks over frames, and their widths as shares of its length.
        max_frame_symbols, max_symbols: decoding goes on to the next frame after so many tokens of one, and ends after
            so many.
        learning_rate_min: the rate decays no further.
    """

    sample_rate: Annotated[int, AtLeast(1)]
    speed_min: Annotated[float, Positive]
    speed_max: Annotated[float, Positive]
    silence_db: Annotated[float, Finite]
    silence_window: Annotated[int, AtLeast(1)]
    silence_reset: Annotated[int, AtLeast(1)]
    dither: Annotated[float, FiniteNotNegative]
    preemphasis: Annotated[float, Share]
    fft: Annotated[int, AtLeast(1)]
    window: Annotated[int, AtLeast(1)]
    hop: Annotated[int, AtLeast(1)]
    mel_min: Annotated[float, FiniteNotNegative]
    mel_max: Annotated[float, Positive]
    log_floor: Annotated[float, Positive]
    freq_masks: Annotated[int, NotNegative]
    freq_mask_min: Annotated[int, NotNegative]
    freq_mask_max: Annotated[int, NotNegative]
    time_masks: Annotated[int, NotNegative]
    time_mask_min: Annotated[float, Share]
    time_mask_max: Annotated[float, Share]
    max_frame_symbols: Annotated[int, AtLeast(1)]
    max_symbols: Annotated[int, AtLeast(1)]
    learning_rate_min: Annotated[float, FiniteNotNegative]

    def __post_init__(self) -> None:
        for low, high in (
            ("speed_min", "speed_max"),
            ("freq_mask_min", "freq_mask_max"),
            ("time_mask_min", "time_mask_max"),
            ("mel_min", "mel_max"),
            ("window", "fft"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(f"{low}={getattr(self, low)}: at most {high}={getattr(self, high)}")
        if self.freq_mask_max > self.mel_filters:
            raise ConfigError(f"freq_mask_max={self.freq_mask_max}: a frame has {self.mel_filters} features")


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
        lstm, joint, transducer_loss, audio: implementations; ``audio`` makes the features.
        decode_unroll: steps of the decoder in one captured graph.
    """

    features: Annotated[int, AtLeast(1)]
    loss_scale: Annotated[float, Positive]
    batch_split: Annotated[int, AtLeast(1)] = 1
    lstm: str = AUTO
    joint: str = AUTO
    transducer_loss: str = AUTO
    audio: str = AUTO
    decode_unroll: Annotated[int, AtLeast(1)] = 4


@dataclass(frozen=True)
class ReaderConfig:
    """How utterances are read.

    Attributes:
        buckets: frames, and tokens, that a micro-batch is padded to; each is a graph of its own. A micro-batch takes
            the first that all its utterances fit, so that the last is the largest.
        presort: deal a global batch's utterances to the ranks by length, so that all have long and short ones.
        threads: that read ahead.
        prefetch: micro-batches that are read ahead.
        eval_batch: utterances of an evaluation batch on one rank.
        keep_eval: keep a rank's share of the evaluation audio on its device once it was read.
    """

    buckets: tuple[tuple[int, int], ...]
    presort: bool = True
    threads: Annotated[int, AtLeast(1)] = 2
    prefetch: Annotated[int, AtLeast(1)] = 4
    eval_batch: Annotated[int, AtLeast(1)] = 64
    keep_eval: bool = True

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ConfigError("buckets=[]: at least one number of frames and tokens that micro-batches are padded to")
        frames, tokens = self.buckets[-1]
        for bucket in self.buckets:
            EvenFrames.check("buckets: frames", bucket[0])
            if bucket[1] < 1:
                raise ConfigError(f"buckets: tokens={bucket[1]}: at least 1")
            if bucket[0] > frames or bucket[1] > tokens:
                raise ConfigError(f"buckets={list(self.buckets)}: the last is the largest in frames and in tokens")


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
