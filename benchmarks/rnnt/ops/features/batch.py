"""Input of the feature computation.

Legend: B utterances of a micro-batch, A recorded samples of all of them, with gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

LOBES = 16
"""Zeros of the resampling filter to each side of its middle, the default of DALI."""

DITHER, MASKS = 1, 2
"""Sites of the random bits that an utterance's seed generates."""

NAMES = ("audio", "audio_lengths", "audio_offsets", "speeds", "resampled_lengths", "utterance_seeds")
"""Names of a reader's tensors, in the order of :class:`AudioBatch`."""


@dataclass(frozen=True)
class AudioBatch:
    """Utterances of a micro-batch, on one device.

    Attributes:
        audio_A: int16.
        length_B: int64, recorded samples of each utterance.
        offset_B: int64, first sample of each utterance.
        speed_B: fp64, factor of each utterance's duration.
        resampled_B: int64, samples of each after resampling: see :func:`benchmarks.rnnt.data_settings.resampled`.
        seed_B: int64, random seed of each utterance's noise and masks.
    """

    audio_A: Tensor
    length_B: Tensor
    offset_B: Tensor
    speed_B: Tensor
    resampled_B: Tensor
    seed_B: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> AudioBatch:
        """Return the batch of a reader's tensors."""
        return cls(*(tensors[name] for name in NAMES))

    def __len__(self) -> int:
        return len(self.length_B)
