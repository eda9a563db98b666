"""What the reader of RNN-T's data, and what makes features of it, are told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import (
    AtLeast,
    Finite,
    FiniteNotNegative,
    NotNegative,
    Positive,
    Range,
    Share,
)
from common.errors import ConfigError

Key = tuple[int, int]
"""Spliced frames and tokens that a micro-batch is padded to."""

SIGMAS = 6
"""Standard deviations above the mean that packed rows have room for."""

EvenFrames = Range("two frames are joined to one: an even number", lambda value: value >= 2 and value % 2 == 0)
Even = Range("an even number, at least 2", EvenFrames.holds)
NotNegativeOrInfinite = Range("not negative, .inf for unknown", lambda value: value >= 0)


@dataclass(frozen=True)
class AudioFacts:
    """What the rules fix of the features. Lengths in samples, frequencies in Hz.

    Attributes:
        mel_filters: features of a frame.
        splice: consecutive frames that are stacked to one before the network.
        sample_rate: of the audio.
        speed_min, speed_max: a training utterance is resampled to last between so many times as long.
        silence_db, silence_window: short-term power over ``silence_window`` samples, relative to the utterance's
            maximum, below which its ends are silence.
        dither: deviation of the noise that is added to samples between -1 and 1.
        preemphasis: share of the sample before that is subtracted from each.
        fft, window, hop: of the spectrogram: length of the transform, of Hann's window in it, and from one frame to the
            next.
        mel_min, mel_max: what the mel filters cover.
        log_floor: smallest power of which the logarithm is taken.
        freq_masks, freq_mask_min, freq_mask_max: masks over features of an utterance, and their widths.
        time_masks, time_mask_min, time_mask_max: masks over frames, and their widths as shares of its length.
    """

    mel_filters: Annotated[int, AtLeast(1)]
    splice: Annotated[int, AtLeast(1)]
    sample_rate: Annotated[int, AtLeast(1)]
    speed_min: Annotated[float, Positive]
    speed_max: Annotated[float, Positive]
    silence_db: Annotated[float, Finite]
    silence_window: Annotated[int, AtLeast(1)]
    dither: Annotated[float, FiniteNotNegative]
    preemphasis: Annotated[float, Share]
    fft: Annotated[int, Even]
    window: Annotated[int, Even]
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
        """The most samples, after resampling, that give no more than ``frames`` spliced frames."""
        return frames * self.splice * self.hop - 1


@dataclass(frozen=True)
class RowStatistics:
    """Of the packed rows of an utterance, half its spliced frames, rounded up, times one more than its tokens.

    Attributes:
        mean, deviation: over the utterances that are trained on, at their lengths before silence is trimmed. An
            infinite deviation leaves room for every batch.
    """

    mean: Annotated[float, FiniteNotNegative] = 0.0
    deviation: Annotated[float, NotNegativeOrInfinite] = math.inf

    def capacity(self, utterances: int, key: Key) -> int:
        """Packed rows that a micro-batch of ``utterances`` has room for: those of nearly every one, or of all."""
        frames, tokens = key
        largest = utterances * -(-frames // 2) * (tokens + 1)
        wanted = utterances * self.mean + SIGMAS * math.sqrt(utterances) * self.deviation
        return min(largest, math.ceil(wanted)) if math.isfinite(wanted) else largest


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """How utterances are read.

    Attributes:
        buckets: frames, and tokens, that a micro-batch is padded to; each is a graph of its own. A micro-batch takes
            the smallest that all its utterances fit. The last is the largest.
        eval_buckets: frames that an evaluation batch is padded to, from the fewest to the most.
        rows: of the packed rows that a graph has room for. A micro-batch with more runs without a graph.
        threads: that read ahead.
        eval_batch: utterances of an evaluation batch on one rank.
    """

    buckets: tuple[tuple[int, int], ...]
    eval_buckets: tuple[int, ...]
    rows: RowStatistics = RowStatistics()
    threads: Annotated[int, AtLeast(1)] = 2
    eval_batch: Annotated[int, AtLeast(1)] = 64

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
        if not self.eval_buckets or sorted(set(self.eval_buckets)) != list(self.eval_buckets):
            raise ConfigError(f"eval_buckets={list(self.eval_buckets)}: numbers of frames, the fewest first")
        for frames in self.eval_buckets:
            EvenFrames.check("eval_buckets", frames)


@dataclass(frozen=True)
class DataSettings:
    """How a data set becomes micro-batches.

    Attributes:
        facts: of the audio.
        reader: threads, padding and order.
        max_duration: seconds of the longest training utterance, as it was recorded.
        num_buckets: groups of utterances of like length that batches are drawn from; 1 is a plain shuffle.
        train_samples: utterances of an epoch, at least; those beyond whole global batches are dropped.
    """

    facts: AudioFacts
    reader: ReaderConfig
    max_duration: float
    num_buckets: int
    train_samples: int
