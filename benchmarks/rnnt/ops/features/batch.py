"""What the features are made of.

Legend: B utterances of a micro-batch, A samples of all of them, as they were recorded, with gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

LOBES = 16
"""Zeros of the resampling filter to each side of its middle; as many as DALI's default has."""

DITHER, MASKS = 1, 2
"""Sites of the random bits that an utterance's seed gives."""

NAMES = ("audio", "audio_lengths", "audio_offsets", "speeds", "resampled_lengths", "utterance_seeds")
"""Of a reader's tensors, in the order of :class:`AudioBatch`."""


@dataclass(frozen=True)
class AudioBatch:
    """The utterances of a micro-batch, on one device.

    Attributes:
        audio_A: int16.
        length_B: int64, samples of each as it was recorded.
        offset_B: int64, where each begins.
        speed_B: fp64, how many times as long each is played.
        resampled_B: int64, samples of each then: see :func:`benchmarks.rnnt.lengths.resampled`.
        seed_B: int64, of each one's noise and masks.
    """

    audio_A: Tensor
    length_B: Tensor
    offset_B: Tensor
    speed_B: Tensor
    resampled_B: Tensor
    seed_B: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> AudioBatch:
        """That of a reader's tensors."""
        return cls(*(tensors[name] for name in NAMES))

    def __len__(self) -> int:
        return len(self.length_B)
