"""How long an utterance is: in samples once it is resampled, in frames, in rows of the joint network.

Exact on the host. Silence is trimmed later, on the device: what is said here is never exceeded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.data_settings import AudioFacts


def resampled(samples: NDArray[np.int64], speed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Samples of utterances that are played ``speed`` times as long: rounded up, as DALI does of speeds in fp32."""
    return np.ceil(samples * speed).astype(np.int64)


def frames(samples: NDArray[np.int64], facts: AudioFacts) -> NDArray[np.int64]:
    """Frames of the spectrogram: one is centred on every sample that is a multiple of the hop."""
    return samples // facts.hop + 1


def spliced_frames(samples: NDArray[np.int64], facts: AudioFacts) -> NDArray[np.int64]:
    """Frames that the network sees, the last of which may be padded."""
    return -(-frames(samples, facts) // facts.splice)


def packed_rows(frames_B: NDArray[np.int64], tokens_B: NDArray[np.int64]) -> int:
    """Rows that a micro-batch of such spliced frames and tokens has in the joint network, where two frames are one."""
    return int((-(-frames_B // 2) * (tokens_B + 1)).sum())
