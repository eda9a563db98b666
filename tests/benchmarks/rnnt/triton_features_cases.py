"""Triton's features against the reference in float64; run by tests/test_interpreted_kernels.py. Fresh memory holds
NaN here."""

from __future__ import annotations

import features_oracle as oracle
import pytest
import small_corpus
import torch

from benchmarks.rnnt.ops.features import reference
from benchmarks.rnnt.ops.features import triton as features_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory", "bfloat16_products", "rounded_conversions")

FACTS = small_corpus.facts()
LENGTHS, SPEEDS, FRAMES = (13000, 9000, 7000, 1500, 170), (1.15, 0.85, 1.0, 0.97, 1.0), 32


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted programs cost by their number."""
    for name in ("resample", "emphasise"):
        monkeypatch.setitem(features_triton.TILES, name, features_triton.TILES[name]._replace(rows=4096))


@pytest.mark.parametrize(("augmented", "columns"), [(False, 256), (True, 241)])
def test_features_are_those_of_the_reference(augmented: bool, columns: int) -> None:
    audio = oracle.utterances(LENGTHS, SPEEDS)
    found, length_B = features_triton.features(audio, FACTS, FRAMES, columns, augmented, torch.float32)
    expected, expected_B = reference.features_reference(
        audio, FACTS, FRAMES, columns, augmented, torch.float64, torch.float64
    )
    assert torch.equal(length_B, expected_B)
    assert torch.equal(found == 0, expected == 0)  # the same masks
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


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


def test_half_precision_rounds_what_single_precision_gives() -> None:
    audio = oracle.utterances(LENGTHS[:2], SPEEDS[:2])
    whole, half = (
        features_triton.features(audio, FACTS, FRAMES, 256, True, dtype)[0] for dtype in (torch.float32, torch.float16)
    )
    assert torch.equal(half, whole.half())


def test_samples_that_do_not_lie_behind_one_another_are_refused() -> None:
    audio = oracle.utterances(LENGTHS, SPEEDS)
    audio = type(audio)(audio.audio_A[::2], *(getattr(audio, name) for name in list(audio.__dataclass_fields__)[1:]))
    with pytest.raises(ValueError, match="audio_A must be contiguous"):
        features_triton.features(audio, FACTS, FRAMES, 256, False, torch.float32)
