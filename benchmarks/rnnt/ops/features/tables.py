"""The constants of the features: mel filters, Hann's window, the widths of masks.

Legend: K bins of the spectrogram, M mel filters.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.data_settings import AudioFacts

_LINEAR_UNTIL = 1000.0
"""Hz; Slaney's scale is linear below (Auditory Toolbox, version 2, Interval Research Corporation 1998)."""
_LINEAR_STEP = 200.0 / 3.0
"""Hz of a mel there."""
_LOG_STEP = np.log(6.4) / 27.0
"""Of the natural logarithm of the frequency, of a mel above."""


def mel_of_hz(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's mel scale."""
    above = np.maximum(frequency, _LINEAR_UNTIL) / _LINEAR_UNTIL
    linear = np.minimum(frequency, _LINEAR_UNTIL) / _LINEAR_STEP
    return linear + np.log(above) / _LOG_STEP


def hz_of_mel(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """What :func:`mel_of_hz` undoes."""
    turn = _LINEAR_UNTIL / _LINEAR_STEP
    return np.minimum(mel, turn) * _LINEAR_STEP * np.exp(np.maximum(mel - turn, 0.0) * _LOG_STEP)


@functools.lru_cache(maxsize=4)
def mel_filters(facts: AudioFacts) -> NDArray[np.float64]:
    """Triangles of equal area over the power spectrum, (M, K), K being half the transform's length and one more."""
    bins = np.fft.rfftfreq(facts.fft, 1.0 / facts.sample_rate)
    ends = mel_of_hz(np.array([facts.mel_min, facts.mel_max]))
    corners = hz_of_mel(np.linspace(ends[0], ends[1], facts.mel_filters + 2))
    low, peak, high = (corners[first : first + facts.mel_filters, None] for first in range(3))
    triangles = np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak))
    filters: NDArray[np.float64] = np.maximum(triangles, 0.0) * (2.0 / (high - low))
    filters.flags.writeable = False
    return filters


def hann(window: int) -> NDArray[np.float64]:
    """Hann's window, periodic: its first value is zero, and its maximum at the middle is 1."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(window) / window)


def mask_widths(share: float, frames: int) -> NDArray[np.int32]:
    """Widths of masks over frames, by the length of an utterance from 0 to ``frames``: rounded half to even."""
    return np.rint(np.arange(frames + 1) * share).astype(np.int32)
