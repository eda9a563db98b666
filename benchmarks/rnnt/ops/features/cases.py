"""Test and benchmark cases of the features: a micro-batch of utterances with LibriSpeech's lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.data_settings import resampled
from benchmarks.rnnt.example import real_lengths
from benchmarks.rnnt.ops.features.reference import AudioBatch
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass

FACTS = fixed_facts(Facts, "rnnt")

GAP = 5
"""Number of loud samples before each utterance. They must not be read."""


def utterances_of(utterances: int | Sequence[tuple[int, float]], draw: Draw) -> AudioBatch:
    """Return white noise. The first seventh and the last eighth of each utterance are silent.

    Args:
        utterances: number of utterances, with the lengths of LibriSpeech; or for each utterance the number of recorded
            samples and the factor by which its duration is changed.
        draw: source of the samples.
    """
    if isinstance(utterances, int):
        random = np.random.default_rng(0)
        frames_B = real_lengths(utterances, FACTS, random).frames_B
        speed_B = random.uniform(FACTS.speed_min, FACTS.speed_max, utterances)
        length_B = (FACTS.splice * FACTS.hop * (frames_B - 0.5) / speed_B).astype(np.int64)
    else:
        length_B = np.array([length for length, _ in utterances], dtype=np.int64)
        speed_B = np.array([speed for _, speed in utterances])
    offset_B = np.cumsum(length_B + GAP) - length_B
    audio_A = draw.integers(-3000, 3000, int(offset_B[-1] + length_B[-1] + GAP), dtype=torch.int16)
    for first, length in zip(offset_B.tolist(), length_B.tolist(), strict=True):
        own_N = audio_A[first : first + length]
        own_N[: length // 7] = own_N[length - length // 8 :] = 1
        audio_A[first - GAP : first] = 30000
    on_host = length_B, offset_B, speed_B, resampled(length_B, speed_B)
    seed_B = draw.integers(0, 2**62, len(length_B))
    columns = [*(torch.from_numpy(each).to(draw.device) for each in on_host), seed_B]
    return AudioBatch(audio_A, *columns)


def passes(
    function: Callable[..., Any],
    draw: Draw,
    utterances: int | Sequence[tuple[int, float]],
    frames: int,
    columns: int,
    augmented: bool,
) -> list[Pass]:
    """Return the forward pass.

    Bytes count samples, features, and five times the resampled samples in fp32 between them.

    Args:
        frames: frames of the longest utterance.
        columns: columns of a frame, including the zeros at its end.
        augmented: whether SpecAugment masks the features.
    """
    audio = utterances_of(utterances, draw)
    samples = float(audio.resampled_B.sum())
    moved = 2 * samples + 5 * 4 * samples + frames * len(audio) * columns * draw.dtype.itemsize
    precision = (torch.float64, torch.float64) if draw.fp64 else (draw.dtype,)
    return [Pass("forward", lambda: function(audio, FACTS, frames, columns, augmented, *precision), moved)]


CASES = (
    Case(
        "LibriSpeech",
        passes,
        {"utterances": 192, "frames": 642, "columns": 256, "augmented": True},
        tests=[
            {"utterances": ((9200, 1.15), (170, 1.0)), "frames": 23, "columns": 241},
            {"utterances": ((2700, 0.85), (2048, 1.0), (2047, 0.97)), "frames": 6, "augmented": False},
        ],
        gpu={"utterances": 16},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        tolerance=3.0,
        tf32=True,
    ),
)
