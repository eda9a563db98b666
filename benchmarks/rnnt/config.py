"""RNN-T's own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast, NotNegative, Positive, Probability, ProbabilityBelowOne
from common.errors import ConfigError


@dataclass(frozen=True)
class Architecture:
    """The shape of the network.

    Attributes:
        classes: tokens and, as the last of them, blank.
        features: of a spliced frame that the encoder reads; what is beyond ``mel * splice`` is zero.
        encoder_width: hidden size of the encoder's layers.
        pre_layers, post_layers: of the encoder, before and after frames are stacked in time.
        stack: frames that are stacked.
        encoder_dropout: probability, behind every layer of the encoder.
        prediction_width: of the embedding and of the hidden state of the prediction network's layers.
        prediction_layers: of it.
        prediction_dropout: probability, behind each of them.
        joint_width: of the hidden layer of the joint network.
        joint_dropout: probability.
        forget_bias: what the forget gates start from, before LSTMs are scaled.
    """

    classes: Annotated[int, AtLeast(2)]
    features: Annotated[int, AtLeast(1)]
    encoder_width: Annotated[int, AtLeast(1)]
    pre_layers: Annotated[int, AtLeast(1)]
    post_layers: Annotated[int, AtLeast(1)]
    stack: Annotated[int, AtLeast(1)]
    encoder_dropout: Annotated[float, ProbabilityBelowOne]
    prediction_width: Annotated[int, AtLeast(1)]
    prediction_layers: Annotated[int, AtLeast(1)]
    prediction_dropout: Annotated[float, ProbabilityBelowOne]
    joint_width: Annotated[int, AtLeast(1)]
    joint_dropout: Annotated[float, ProbabilityBelowOne]
    forget_bias: float


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: the network, which takes them as they are, features and decoding.

    Lengths in samples are at ``sample_rate``.

    Attributes:
        sample_rate: Hz.
        least_speed, most_speed: by which an utterance's duration is multiplied.
        trim_decibels: short-term power, below the utterance's largest, under which its ends are silence.
        trim_window: samples that the power is taken over.
        dither: standard deviation of the noise that is added to samples.
        preemphasis: share of the sample before that is subtracted.
        fft: samples of a Fourier transform.
        window, hop: samples of a window, and between two of them.
        mel: filters.
        least_power: floor of the mel powers before the logarithm.
        frequency_masks, frequency_width: how many, and the most filters of one.
        time_masks, time_share: how many, and the largest share of an utterance's frames of one.
        splice: frames that become one.
        symbols_of_frame, symbols_of_utterance: that decoding puts out at most.
    """

    sample_rate: Annotated[int, AtLeast(1)]
    least_speed: Annotated[float, Positive]
    most_speed: Annotated[float, Positive]
    trim_decibels: float
    trim_window: Annotated[int, AtLeast(1)]
    dither: Annotated[float, NotNegative]
    preemphasis: Annotated[float, Probability]
    fft: Annotated[int, AtLeast(2)]
    window: Annotated[int, AtLeast(1)]
    hop: Annotated[int, AtLeast(1)]
    mel: Annotated[int, AtLeast(1)]
    least_power: Annotated[float, Positive]
    frequency_masks: Annotated[int, NotNegative]
    frequency_width: Annotated[int, NotNegative]
    time_masks: Annotated[int, NotNegative]
    time_share: Annotated[float, Probability]
    splice: Annotated[int, AtLeast(1)]
    symbols_of_frame: Annotated[int, AtLeast(1)]
    symbols_of_utterance: Annotated[int, AtLeast(1)]

    def __post_init__(self) -> None:
        if self.features < self.mel * self.splice:
            raise ConfigError(f"features={self.features}: at least mel * splice = {self.mel * self.splice}")
        if self.least_speed > self.most_speed:
            raise ConfigError(f"least_speed={self.least_speed}: at most most_speed={self.most_speed}")
