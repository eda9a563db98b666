"""Lengths of an utterance: resampled samples, frames, and rows of the joint network.

They are exact on the host. The device trims silence later, so the final lengths are never larger.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.data_settings import AudioFacts


def resampled(samples: NDArray[np.int64], speed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the samples after durations are multiplied by ``speed``: rounded up, like DALI with fp32 speeds."""
    return np.ceil(samples * speed).astype(np.int64)


def frames(samples: NDArray[np.int64], facts: AudioFacts) -> NDArray[np.int64]:
    """Return the frames of the spectrogram; one is centred on every multiple of the hop."""
    return samples // facts.hop + 1


def spliced_frames(samples: NDArray[np.int64], facts: AudioFacts) -> NDArray[np.int64]:
    """Return the network's input frames, the last of which may be padded."""
    return -(-frames(samples, facts) // facts.splice)


def packed_rows(frames_B: NDArray[np.int64], tokens_B: NDArray[np.int64]) -> int:
    """Return a micro-batch's rows in the joint network, where pairs of spliced frames are joined."""
    return int((-(-frames_B // 2) * (tokens_B + 1)).sum())
