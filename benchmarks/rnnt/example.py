"""Synthetic micro-batches with the lengths of real ones, for warm-up and benchmarks.

Durations follow the published statistics of LibriSpeech's training utterances of at most 16.7 s: most have 12 to 16
s, the mean is 12.3 s. The speed is drawn from the rules' range. There are about 4.6 tokens per recorded second,
depending on the speaker. For 192 such utterances, this gives 410 spliced frames on average, and 2.5 million packed
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.data_settings import AudioFacts, Key, resampled, spliced_frames
from common.data.order import sample_generator

AVERAGE_SAMPLES, AVERAGE_TOKENS = 195_840, 56
"""Audio samples and tokens of an average utterance, as in NVIDIA's benchmarks."""

_SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0)
_SECONDS = (1.3, 3.5, 5.2, 11.3, 13.85, 15.2, 16.1, 16.7)
"""Quantiles of the duration: ``_SHARES`` of the utterances have at most these seconds."""
_TOKENS_A_SECOND, _TOKENS_DEVIATION = 4.6, 0.6


class Lengths(NamedTuple):
    """Spliced frames and tokens of utterances, (B,) int64."""

    frames_B: NDArray[np.int64]
    tokens_B: NDArray[np.int64]


def average_lengths(utterances: int, facts: AudioFacts) -> Lengths:
    """Return the lengths of average utterances, all equal."""
    frames = spliced_frames(np.array([AVERAGE_SAMPLES], dtype=np.int64), facts)
    return Lengths(np.repeat(frames, utterances), np.full(utterances, AVERAGE_TOKENS, dtype=np.int64))


def real_lengths(utterances: int, facts: AudioFacts, generator: np.random.Generator) -> Lengths:
    """Return lengths distributed as in LibriSpeech, the longest first: a typical micro-batch of any size.

    Durations, speeds and tokens per second each take one value from every ``utterances``-quantile of their
    distribution; ``generator`` decides which values are combined.
    """
    seconds_B, speed_B, rate_B = (generator.permutation((np.arange(utterances) + 0.5) / utterances) for _ in range(3))
    seconds_B = np.interp(seconds_B, _SHARES, _SECONDS)
    speed_B = facts.speed_min + (facts.speed_max - facts.speed_min) * speed_B
    normal = NormalDist(_TOKENS_A_SECOND, _TOKENS_DEVIATION)
    rate_B = np.array([normal.inv_cdf(share) for share in rate_B])
    frames_B = spliced_frames(resampled((seconds_B * facts.sample_rate).astype(np.int64), speed_B), facts)
    tokens_B = np.maximum(seconds_B * rate_B, 1).astype(np.int64)
    order_B = np.argsort(-frames_B, kind="stable")
    return Lengths(frames_B[order_B], tokens_B[order_B])


def lengths_of(examples: str, utterances: int, facts: AudioFacts) -> Lengths:
    """Return the lengths that the option ``model.examples`` selects, ``real`` or ``average``; always the same ones."""
    if examples == "average":
        return average_lengths(utterances, facts)
    return real_lengths(utterances, facts, sample_generator(0))


def own_key(lengths: Lengths, keys: Sequence[Key]) -> Key:
    """Return the first of ``keys`` that a micro-batch fits, or the last."""
    longest = lengths.frames_B.max(), lengths.tokens_B.max()
    return next((key for key in keys if all(np.less_equal(longest, key))), keys[-1])


def fitted(lengths: Lengths, key: Key) -> Lengths:
    """Return ``lengths`` clipped to ``key``."""
    return Lengths(np.clip(lengths.frames_B, 1, key[0]), np.clip(lengths.tokens_B, 1, key[1]))


def batch(
    lengths: Lengths, key: Key, features: int, columns: int, blank: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the ``tensors`` of ``Rnnt.loss``: features are noise of deviation 1, and tokens are random.

    Args:
        key: frames and tokens to which utterances are padded.
        features, columns: features of a frame, without and with zero padding.
        blank: index of the blank; tokens are less.
    """
    frames, tokens = key
    utterances = len(lengths.frames_B)
    generator = torch.Generator(device).manual_seed(0)
    frames_B = torch.from_numpy(lengths.frames_B).to(device, torch.int32)
    tokens_B = torch.from_numpy(lengths.tokens_B).to(device, torch.int32)
    features_TBF = torch.zeros((frames, utterances, columns), dtype=dtype, device=device)
    noise_TBF = torch.randn((frames, utterances, features), generator=generator, device=device)
    real_TB1 = (torch.arange(frames, device=device)[:, None] < frames_B)[:, :, None]
    features_TBF[:, :, :features] = (noise_TBF * real_TB1).to(dtype)
    drawn_BU = torch.randint(blank, (utterances, tokens), generator=generator, device=device, dtype=torch.int32)
    real_BU = torch.arange(tokens, device=device) < tokens_B[:, None]
    return {
        "features": features_TBF,
        "feature_lengths": frames_B,
        "tokens": drawn_BU * real_BU,
        "token_lengths": tokens_B,
        "seed": torch.ones(1, dtype=torch.int64, device=device),
    }
