"""Features of a micro-batch of utterances with LibriSpeech's lengths, in fp16: all of it, and each of its stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.example import real_lengths
from benchmarks.rnnt.lengths import resampled
from benchmarks.rnnt.ops import features
from benchmarks.rnnt.ops.features.batch import AudioBatch
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

FRAMES, COLUMNS = 642, 256
"""Of the longest utterance, played as long as it can be."""

BATCHES = (192, 8)
"""Utterances at which tiles are tried."""


def utterances(batch: int, facts: Facts) -> AudioBatch:
    """Noise, one after another."""
    random = np.random.default_rng(0)
    frames_B = real_lengths(batch, facts, random).frames_B
    speed_B = random.uniform(facts.speed_min, facts.speed_max, batch)
    length_B = (facts.splice * facts.hop * (frames_B - 0.5) / speed_B).astype(np.int64)
    end_B = np.cumsum(-(-length_B // 8) * 8)
    audio = random.integers(-3000, 3000, int(end_B[-1]), np.int16)
    offset_B = np.concatenate([[0], end_B[:-1]])
    columns = audio, length_B, offset_B, speed_B, resampled(length_B, speed_B), random.integers(2**62, size=batch)
    return AudioBatch(*(torch.from_numpy(column).to(cases.DEVICE) for column in columns))


def case(function: Callable[..., Any], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Samples are read and features written; between, there is as much fp32 as resampled samples, five times."""
    facts = fixed_facts(Facts, "rnnt")
    audio = utterances(batch, facts)
    samples = float(audio.resampled_B.sum())
    moved = 2.0 * samples + 5 * 4.0 * samples + FRAMES * batch * COLUMNS * dtype.itemsize
    return [Pass("forward", lambda: function(audio, facts, FRAMES, COLUMNS, True, dtype), moved)]


def entries() -> list[Entry]:
    """Every implementation, and the stages of Triton's."""
    return [*each("features", features.FEATURES, "triton", {}, case), *_stages()]


def sweeps() -> dict[str, Sweep]:
    """Rows, columns, depth, warps and stages of a program."""
    from benchmarks.rnnt.ops.features import triton

    elements = [(rows, 1, 1, warps, 1) for rows, warps in itertools.product((256, 512, 1024), (2, 4))]
    frames = [
        (64, 64, 64, 4, 2),
        (64, 64, 32, 4, 2),
        (64, 64, 32, 8, 3),
        (64, 64, 64, 8, 2),
        (64, 128, 64, 8, 2),
        (128, 64, 64, 8, 2),
        (128, 64, 32, 8, 3),
        (128, 128, 32, 8, 2),
    ]
    choices = {
        "resample": elements,
        "emphasise": elements,
        "log_mel": frames,
        "splice": [(rows, 1, 1, warps, 1) for rows, warps in itertools.product((16, 32, 64), (4, 8))],
    }
    function = features.FEATURES.function("triton")
    return {
        f"features {name} n {batch}": Sweep(
            triton.TILES, name, choices[name], functools.partial(case, function, batch), False
        )
        for batch in BATCHES
        for name in choices
    }


def _stages() -> list[Entry]:
    return [Entry(f"features {name} triton", 0, functools.partial(_stage, name)) for name in _STAGES]


_STAGES = ("resample", "trimmed", "emphasise", "log_mel", "splice")


def _stage(name: str, batch: int, dtype: torch.dtype) -> list[Pass]:
    from benchmarks.rnnt.ops.features import triton

    facts = fixed_facts(Facts, "rnnt")
    audio = utterances(batch, facts)
    samples = float(audio.resampled_B.sum())
    signal_BN = triton.resample(audio, FRAMES, facts)
    signal = triton.trimmed(signal_BN, audio, facts)
    emphasised_2BP = triton.emphasise(signal, audio, facts)
    mel_BSM, statistics = triton.log_mel(emphasised_2BP, signal.kept_B, FRAMES, facts)
    mel = 4.0 * facts.mel_filters / facts.hop * samples
    stages: dict[str, tuple[Callable[[], Any], float]] = {
        "resample": (lambda: triton.resample(audio, FRAMES, facts), 6 * samples),
        "trimmed": (lambda: triton.trimmed(signal_BN, audio, facts), 4 * samples),
        "emphasise": (lambda: triton.emphasise(signal, audio, facts), 8 * samples),
        "log_mel": (lambda: triton.log_mel(emphasised_2BP, signal.kept_B, FRAMES, facts), 4 * samples + mel),
        "splice": (
            lambda: triton.splice(mel_BSM, statistics, signal, audio, FRAMES, COLUMNS, True, dtype, facts),
            mel + FRAMES * batch * COLUMNS * dtype.itemsize,
        ),
    }
    run, moved = stages[name]
    return [Pass("forward", run, moved)]
