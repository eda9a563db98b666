"""Constants of the features: mel filters, Hann window, widths of masks.

Legend: K bins of the spectrogram, M mel filters.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.data_settings import AudioFacts

_LINEAR_UNTIL = 1000.0
"""Upper end in Hz of the linear part of Slaney's scale (Auditory Toolbox, version 2, 1998)."""
_LINEAR_STEP = 200.0 / 3.0
"""Hz per mel in the linear part."""
_LOG_STEP = np.log(6.4) / 27.0
"""Increase of the natural logarithm of the frequency per mel above it."""


def mel_of_hz(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert Hz to Slaney's mel scale."""
    above = np.maximum(frequency, _LINEAR_UNTIL) / _LINEAR_UNTIL
    linear = np.minimum(frequency, _LINEAR_UNTIL) / _LINEAR_STEP
    return linear + np.log(above) / _LOG_STEP


def hz_of_mel(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert Slaney's mel scale to Hz."""
    turn = _LINEAR_UNTIL / _LINEAR_STEP
    return np.minimum(mel, turn) * _LINEAR_STEP * np.exp(np.maximum(mel - turn, 0.0) * _LOG_STEP)


@functools.lru_cache(maxsize=4)
def mel_filters(facts: AudioFacts) -> NDArray[np.float64]:
    """Return triangles of equal area over the power spectrum, (M, K), with K = fft / 2 + 1."""
    bins = np.fft.rfftfreq(facts.fft, 1.0 / facts.sample_rate)
    ends = mel_of_hz(np.array([facts.mel_min, facts.mel_max]))
    corners = hz_of_mel(np.linspace(ends[0], ends[1], facts.mel_filters + 2))
    low, peak, high = (corners[first : first + facts.mel_filters, None] for first in range(3))
    triangles = np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak))
    filters: NDArray[np.float64] = np.maximum(triangles, 0.0) * (2.0 / (high - low))
    filters.flags.writeable = False
    return filters


def hann(window: int) -> NDArray[np.float64]:
    """Return the periodic Hann window: its first value is 0, and its maximum in the middle is 1."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(window) / window)


def mask_widths(share: float, frames: int) -> NDArray[np.int32]:
    """Return widths of masks over frames for utterances of 0 to ``frames`` frames, rounded half to even."""
    return np.rint(np.arange(frames + 1) * share).astype(np.int32)
