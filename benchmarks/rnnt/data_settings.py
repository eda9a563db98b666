"""Settings of RNN-T's reader and feature computation, and the lengths that follow from them.

Lengths are exact on the host. The device trims silence later, so the final lengths are never larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.config.ranges import (
    AtLeast,
    Finite,
    NotNegative,
    Positive,
    Range,
    Share,
)
from common.errors import ConfigError

Key = tuple[int, int]
"""Spliced frames and tokens to which a micro-batch is padded."""

SIGMAS = 6
"""Standard deviations above the mean in the capacity of packed rows."""

EvenFrames = Range("two frames are joined to one: an even number", lambda value: value >= 2 and value % 2 == 0)
Even = Range("an even number, at least 2", EvenFrames.holds)
NotNegativeOrInfinite = Range("not negative, .inf for unknown", lambda value: value >= 0)


@dataclass(frozen=True)
class AudioFacts:
    """Constants of the features, fixed by the rules. Lengths in samples, frequencies in Hz.

    Attributes:
        mel_filters: features of a frame.
        splice: consecutive frames that are concatenated before the network.
        speed_min, speed_max: range of the factor by which resampling changes a training utterance's duration.
        silence_db, silence_window: short-term power over ``silence_window`` samples, relative to the utterance's
            maximum, below which its ends are silence.
        dither: standard deviation of the noise that is added to samples in [-1, 1].
        preemphasis: fraction of the previous sample that is subtracted from each.
        fft, window, hop: length of the Fourier transform and of the Hann window, and distance between frames.
        mel_min, mel_max: frequency range of the mel filters.
        log_floor: lower bound of the power before the logarithm.
        freq_masks, freq_mask_min, freq_mask_max: number of masks over features per utterance, and range of their
            widths.
        time_masks, time_mask_min, time_mask_max: number of masks over frames, and range of their widths as fractions
            of the utterance.
    """

    mel_filters: Annotated[int, AtLeast(1)]
    splice: Annotated[int, AtLeast(1)]
    sample_rate: Annotated[int, AtLeast(1)]
    speed_min: Annotated[float, Positive]
    speed_max: Annotated[float, Positive]
    silence_db: Annotated[float, Finite]
    silence_window: Annotated[int, AtLeast(1)]
    dither: Annotated[float, NotNegative]
    preemphasis: Annotated[float, Share]
    fft: Annotated[int, Even]
    window: Annotated[int, Even]
    hop: Annotated[int, AtLeast(1)]
    mel_min: Annotated[float, NotNegative]
    mel_max: Annotated[float, Positive]
    log_floor: Annotated[float, Positive]
    freq_masks: Annotated[int, NotNegative]
    freq_mask_min: Annotated[int, NotNegative]
    freq_mask_max: Annotated[int, NotNegative]
    time_masks: Annotated[int, NotNegative]
    time_mask_min: Annotated[float, Share]
    time_mask_max: Annotated[float, Share]

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

    def largest_resampled(self, frames: int) -> int:
        """Return the maximum number of resampled samples that give at most ``frames`` spliced frames."""
        return frames * self.splice * self.hop - 1


@dataclass(frozen=True)
class RowStatistics:
    """Distribution of an utterance's packed rows: half its spliced frames, rounded up, times (tokens + 1).

    Attributes:
        mean, deviation: over the training utterances, before silence is trimmed. With an infinite deviation, the
            capacity suffices for every batch.
    """

    mean: Annotated[float, NotNegative] = 0.0
    deviation: Annotated[float, NotNegativeOrInfinite] = math.inf

    def capacity(self, utterances: int, key: Key) -> int:
        """Return a number of packed rows that nearly every micro-batch of ``utterances`` padded to ``key`` fits."""
        frames, tokens = key
        largest = utterances * -(-frames // 2) * (tokens + 1)
        wanted = utterances * self.mean + SIGMAS * math.sqrt(utterances) * self.deviation
        return min(largest, math.ceil(wanted)) if math.isfinite(wanted) else largest


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Options of the reader.

    Attributes:
        buckets: frames and tokens to which micro-batches are padded; each needs a CUDA graph. A micro-batch uses the
            smallest bucket that fits all its utterances. The last is the largest.
        eval_buckets: frames to which evaluation batches are padded, ascending.
        rows: distribution from which the capacity of packed rows in a graph follows. A micro-batch with more rows
            runs without a graph.
        threads: threads that read ahead.
        eval_batch: utterances of an evaluation batch on one rank.
    """

    buckets: tuple[tuple[int, int], ...]
    eval_buckets: tuple[int, ...]
    rows: RowStatistics = RowStatistics()
    threads: Annotated[int, AtLeast(1)] = 2
    eval_batch: Annotated[int, AtLeast(1)] = 64

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ConfigError("buckets=[]: at least one pair of frames and tokens")
        frames, tokens = self.buckets[-1]
        for bucket in self.buckets:
            EvenFrames.check("buckets: frames", bucket[0])
            if bucket[1] < 1:
                raise ConfigError(f"buckets: tokens={bucket[1]}: at least 1")
            if bucket[0] > frames or bucket[1] > tokens:
                raise ConfigError(f"buckets={list(self.buckets)}: the last is the largest in frames and in tokens")
        if not self.eval_buckets or sorted(set(self.eval_buckets)) != list(self.eval_buckets):
            raise ConfigError(f"eval_buckets={list(self.eval_buckets)}: different numbers of frames, ascending")
        for frames in self.eval_buckets:
            EvenFrames.check("eval_buckets", frames)


@dataclass(frozen=True)
class SpeechDataSettings:
    """Settings that determine the micro-batches of a data set.

    Attributes:
        max_duration: maximum duration of a training utterance as recorded, in seconds.
        num_buckets: buckets of utterances of similar length from which batches are drawn; 1 is a plain shuffle.
        train_samples: required utterances per epoch; those beyond whole global batches are dropped.
    """

    facts: AudioFacts
    reader: ReaderConfig
    max_duration: float
    num_buckets: int
    train_samples: int


def resampled(samples: NDArray[np.int64], speed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the samples after durations are multiplied by ``speed``: rounded up, like DALI with fp32 speeds."""
    return np.ceil(samples * speed).astype(np.int64)


def spliced_frames(samples: NDArray[np.int64], facts: AudioFacts) -> NDArray[np.int64]:
    """Return the network's input frames. A spectrogram has a frame at each multiple of the hop."""
    return -(-(samples // facts.hop + 1) // facts.splice)


def joint_rows(frames_B: NDArray[np.int64], tokens_B: NDArray[np.int64]) -> int:
    """Return a micro-batch's rows in the joint network, where pairs of spliced frames are joined."""
    return int((-(-frames_B // 2) * (tokens_B + 1)).sum())
