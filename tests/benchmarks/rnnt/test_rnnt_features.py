"""Test the features in plain PyTorch against their definition."""

from __future__ import annotations

import dataclasses
import math

import features_oracle as oracle
import numpy as np
import pytest
import small_corpus
import torch

from benchmarks.rnnt.data import FeaturePreparer, synthetic_batch
from benchmarks.rnnt.data_settings import spliced_frames
from benchmarks.rnnt.ops.features import FEATURES, reference
from benchmarks.rnnt.ops.features.reference import AudioBatch
from common.data.batches import HostBatch
from common.errors import UnsupportedImplementation
from common.ops.operation import OperationRequest

FACTS = small_corpus.facts()
QUIET = small_corpus.facts(dither=0.0)
LENGTHS, SPEEDS, FRAMES = (4100, 3500, 3100, 1500, 2601), (0.85, 1.15, 1.0, 0.97, 1.0371), 24


def made(audio: AudioBatch, facts=QUIET, augmented=False, precision=torch.float64, frames=FRAMES):
    return reference.features_reference(audio, facts, frames, 256, augmented, precision, precision)


def taken(audio: AudioBatch, slots: list[int]) -> AudioBatch:
    columns = {field.name: getattr(audio, field.name)[slots] for field in dataclasses.fields(audio)[1:]}
    return AudioBatch(audio.audio_A, **columns)


def test_features_equal_their_definition():
    audio = oracle.utterances(LENGTHS, SPEEDS)
    features_TBF, length_B = made(audio)
    assert features_TBF.shape == (FRAMES, len(LENGTHS), 256)
    for slot in range(len(LENGTHS)):
        expected = torch.from_numpy(oracle.features(audio, slot))
        assert length_B[slot] == len(expected)
        torch.testing.assert_close(features_TBF[: len(expected), slot, :240], expected, rtol=0, atol=2e-4)
        assert not features_TBF[len(expected) :, slot].any()
    assert not features_TBF[:, :, 240:].any()


def test_single_precision_is_close_to_double():
    audio = oracle.utterances(LENGTHS, SPEEDS)
    for augmented in (False, True):
        (found, length_B), (expected, _) = (
            made(audio, FACTS, augmented, precision) for precision in (torch.float32, torch.float64)
        )
        assert found.dtype == torch.float32
        assert length_B.dtype == torch.int32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)


def test_features_do_not_depend_on_other_utterances():
    audio = oracle.utterances(LENGTHS, SPEEDS)
    whole_TBF, length_B = made(audio, FACTS)
    for slots in ([3, 1], [4], [2, 0, 1, 4, 3]):
        some_TBF, some_B = made(taken(audio, slots), FACTS)
        torch.testing.assert_close(some_TBF, whole_TBF[:, slots], rtol=0.0, atol=1e-10)  # sums in another order
        assert torch.equal(some_B, length_B[slots])
    torch.testing.assert_close(made(audio, FACTS, frames=40)[0][:FRAMES], whole_TBF, rtol=0.0, atol=1e-10)


def test_lengths_give_the_known_numbers_of_spliced_frames():
    samples = np.array([195_840, 0, 159, 160, 479, 480])
    assert spliced_frames(samples, FACTS).tolist() == [409, 1, 1, 1, 1, 2]
    longest = FACTS.largest_resampled(7)
    assert spliced_frames(np.array([longest, longest + 1]), FACTS).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([(0.0, 3000), (0.5, 4000), (0.0, 5000)], (3000 - 2047, 4000 + 2 * 2047)),
        ([(0.5, 4000), (0.0, 100)], (0, 4100)),
        ([(0.0, 5000)], (0, 5000)),
        ([(0.0, 500), (0.5, 500), (0.0, 500)], (0, 1500)),
        ([(0.0004, 6000), (0.5, 3000)], (6000 - 2047, 3000 + 2047)),
        ([(0.0006, 6000), (0.5, 3000)], (0, 9000)),
    ],
    ids=["both ends", "a short end", "nothing else", "shorter than a window", "61 dB below", "58 dB below"],
)
def test_silence_ends_at_the_first_loud_window(parts, kept):
    sound = torch.cat([torch.full((count,), value, dtype=torch.float64) for value, count in parts])
    padded = torch.nn.functional.pad(sound, (0, 777))[None]
    first_B, kept_B = reference.sounding(padded, torch.tensor([len(sound)]), FACTS)
    assert (int(first_B), int(kept_B)) == kept
    assert (int(first_B), int(kept_B)) == oracle.sounding(sound.numpy())


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_silence_near_the_threshold_is_cut_exactly(precision):
    made = oracle.noise_tails()
    length_B = torch.tensor([len(sound) for sound in made])
    padded = torch.zeros((len(made), int(length_B.max())), dtype=precision)
    for slot, sound in enumerate(made):
        padded[slot, : len(sound)] = torch.from_numpy(sound / 32768)
    first_B, kept_B = reference.sounding(padded, length_B, FACTS)
    found = zip(first_B.tolist(), (first_B + kept_B).tolist(), strict=True)
    assert list(found) == [oracle.sounding_of_integers(sound) for sound in made]


def test_dither_is_normal_noise_that_depends_on_the_seed():
    seed_B = torch.tensor([11, 2**62 + 5, 11])
    zeros_BN, first_B = torch.zeros((3, 40_001), dtype=torch.float64), torch.tensor([0, 0, 0])
    noise_BN = (
        reference.emphasise(zeros_BN, first_B, seed_B, dataclasses.replace(FACTS, preemphasis=0.0)) / FACTS.dither
    )
    assert torch.equal(noise_BN[0], noise_BN[2])
    assert not torch.equal(noise_BN[0], noise_BN[1])
    assert noise_BN.mean(1).abs().max() < 0.03
    assert (noise_BN.std(1) - 1).abs().max() < 0.02
    lagged = (noise_BN[:, 1:] * noise_BN[:, :-1]).mean(1)
    assert lagged.abs().max() < 0.03


def test_filters_equal_torchaudios():
    functional = pytest.importorskip("torchaudio.functional")
    expected = functional.melscale_fbanks(257, 0.0, 8000.0, 80, 16000, norm="slaney", mel_scale="slaney").T
    np.testing.assert_allclose(reference.mel_filters(FACTS), expected.numpy(), atol=1e-6)


def test_features_are_normalised_over_the_utterances_own_frames():
    mel_BSM = torch.randn((3, 50, 80), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 5
    mel_BSM[1, :, 7] = 2.5
    length_B = torch.tensor([50, 20, 1])
    found = reference.normalised(mel_BSM, length_B)
    for row, length in enumerate(length_B.tolist()):
        assert not found[row, length:].any()
        real = found[row, :length]
        varied = mel_BSM[row, :length].var(0, correction=0) > 0
        assert not real[:, ~varied].any()
        np.testing.assert_allclose(real.mean(0).numpy(), 0, atol=1e-12)
        np.testing.assert_allclose(real.var(0, correction=0)[varied].numpy(), 1, rtol=1e-12)


def test_masks_have_the_distribution_of_the_reference():
    """Widths are 0 to the maximum, first positions 0 to the size minus the width, all with equal probability."""
    count, frames = 20_000, 400
    seed_B = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(1))
    length_B = torch.where(torch.arange(count) % 2 == 0, 150, 350)
    length_B[0] = 390
    first_BC, width_BC = reference.masks(seed_B, length_B, frames, FACTS)
    assert first_BC.shape == (count, 12)
    for mask in (0, 1):
        uniform(width_BC[:, mask], 21)
        for width in (0, 20):
            uniform(first_BC[width_BC[:, mask] == width, mask], 80 - width + 1)
    for mask in (2, 11):
        uniform(width_BC[length_B == 150, mask], 5)  # 4.5 rounds to even
        uniform(width_BC[length_B == 350, mask], 11)  # 10.5 too
        first_B = first_BC[width_BC[:, mask] == 4, mask]
        uniform(first_B // 43, 9)  # 387 positions in the longest utterance, also beyond the shorter one
    ends_BC = (first_BC + width_BC)[:, 2:]
    assert ends_BC.max() == 390
    assert (ends_BC == 390).sum() > 10 * len(ends_BC) / 390 / 2
    assert abs(float(np.corrcoef(width_BC[:, 0], width_BC[:, 1])[0, 1])) < 0.03
    assert abs(float(np.corrcoef(width_BC[:, 2], first_BC[:, 2])[0, 1])) < 0.03


def uniform(values: torch.Tensor, count: int) -> None:
    """Assert that each of 0 to count - 1 occurs about equally often, within five standard deviations."""
    found = np.bincount(values.numpy(), minlength=count)
    assert len(found) == count
    expected = len(values) / count
    assert np.abs(found - expected).max() < 5 * math.sqrt(expected) + 1


def test_masks_reach_the_last_feature_and_the_last_frame():
    """The last feature and frame are masked as often as the first, and a mask of full width covers all features."""
    facts = small_corpus.facts(time_mask_min=0.03)
    seed_B, length_B = torch.arange(20_000), torch.full((20_000,), 40)
    frames_BS, features_BM = reference.kept_by_masks(seed_B, length_B, 40, facts)
    for kept in (frames_BS, features_BM):
        masked = (~kept).double().mean(0)
        assert masked[0] > 0
        assert masked[-1] == pytest.approx(float(masked[0]), rel=0.15)
    everything = small_corpus.facts(freq_mask_min=80, freq_mask_max=80)
    assert not reference.kept_by_masks(seed_B[:9], length_B[:9], 40, everything)[1].any()


def test_masked_features_are_zero_and_others_unchanged():
    audio = oracle.utterances(LENGTHS, SPEEDS)
    (plain_TBF, length_B), (masked_TBF, _) = made(audio, FACTS), made(audio, FACTS, augmented=True)
    frames_B = (
        reference.sounding(
            reference.resample(audio, FACTS.largest_resampled(FRAMES), FACTS, torch.float64), audio.resampled_B, FACTS
        )[1]
        // FACTS.hop
        + 1
    )
    first_BC, width_BC = reference.masks(audio.seed_B, frames_B, FRAMES * 3, FACTS)
    for slot in range(len(LENGTHS)):
        expected = plain_TBF[:, slot, :240].reshape(-1, 80).clone()
        for mask, (first, width) in enumerate(zip(first_BC[slot].tolist(), width_BC[slot].tolist(), strict=True)):
            chosen = (slice(None), slice(first, first + width)) if mask < 2 else slice(first, first + width)
            expected[chosen] = 0
        assert torch.equal(masked_TBF[:, slot, :240], expected.reshape(-1, 240))
    assert (masked_TBF != plain_TBF).any()
    assert length_B.max() <= FRAMES


def test_a_preparer_replaces_audio_by_features_and_keeps_the_rest():
    preparer = FeaturePreparer(FACTS, 256, "reference", torch.device("cpu"), torch.bfloat16)
    assert preparer.choice == "reference"
    preparer.warm_up(2, [(4, 3)])
    host = HostBatch(synthetic_batch(FACTS, 2, (4, 3)), 16, 5, (4, 3))
    batch = preparer(host)
    assert (batch.samples, batch.key) == (16, (4, 3))
    assert set(batch.tensors) == {"features", "feature_lengths", "tokens", "token_lengths", "seed"}
    assert batch.tensors["features"].shape == (4, 2, 256)
    assert batch.tensors["features"].dtype == torch.bfloat16
    assert batch.tensors["feature_lengths"].tolist() == [4, 4]
    plain_one = preparer.tensors(host.tensors, 4, training=False)["features"]
    assert not torch.equal(plain_one, batch.tensors["features"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 320 - 2}, "window=318 is no multiple of 64"),
        ({"mel_filters": 129}, "mel_filters=129 is more than"),
        ({"fft": 500}, "fft=500 is no power of 2"),
        ({"percent_of_speed": 49}, "may last 49 % of its time"),
    ],
)
def test_sizes_that_the_kernels_do_not_support_are_refused(changed, message):
    sizes = {"window": 320, "fft": 512, "mel_filters": 80, "silence_window": 2048} | changed
    request = OperationRequest(torch.device("cuda"), torch.float16, sizes)
    assert message in FEATURES.unsupported("triton", request)
    with pytest.raises(UnsupportedImplementation, match=r"model\.implementations\.audio=cufft"):
        FeaturePreparer(FACTS, 256, "cufft", torch.device("cpu"), torch.float32)
