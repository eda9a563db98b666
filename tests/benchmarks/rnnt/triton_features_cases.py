"""Test where the Triton features cut silence, and the inputs that they refuse.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import features_oracle as oracle
import pytest
import small_corpus
import torch

from benchmarks.rnnt.ops.features import reference
from benchmarks.rnnt.ops.features import triton as features_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory", "bfloat16_products", "rounded_conversions")

FACTS = small_corpus.facts()
FRAMES = 32


def test_silence_is_cut_at_the_same_samples() -> None:
    audio = oracle.utterances((9000, 7000, 2047, 2048, 5000), (1.0,) * 5, silent=0.3)
    audio.audio_A[int(audio.offset_B[4]) :] = 0
    signal_BN = reference.resample(audio, FACTS.largest_resampled(FRAMES) + 1, FACTS, torch.float32)
    found = features_triton.trimmed(signal_BN, audio, FACTS)
    first_B, kept_B = reference.sounding(signal_BN, audio.resampled_B, FACTS)
    assert found.first_B.tolist() == first_B.tolist()
    assert found.kept_B.tolist() == kept_B.tolist()
    assert kept_B.tolist()[2:] == [2047, 2048, 5000]
    assert found.length_B.tolist() == (-(-(kept_B // 160 + 1) // 3)).tolist()


def test_samples_that_do_not_lie_behind_one_another_are_refused() -> None:
    audio = oracle.utterances((1500, 170), (1.0, 1.0))
    audio = type(audio)(audio.audio_A[::2], *(getattr(audio, name) for name in list(audio.__dataclass_fields__)[1:]))
    with pytest.raises(ValueError, match="audio_A must be contiguous"):
        features_triton.features(audio, FACTS, FRAMES, 256, False, torch.float32)
