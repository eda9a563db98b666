"""Test RNN-T's features against the DALI operators that the reference uses."""

from __future__ import annotations

import dataclasses
import math

import features_oracle as oracle
import numpy as np
import pytest
import torch

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.ops.features import reference
from benchmarks.rnnt.ops.features.reference import AudioBatch
from common.mlperf.fixed import fixed_facts

dali = pytest.importorskip("nvidia.dali")

FACTS = dataclasses.replace(fixed_facts(Facts, "rnnt"), dither=0.0)
LENGTHS = (9_000, 5_301, 16_000)
SPEED = float(np.float32(1.11))  # DALI's are in fp32


def sounds(silent: int = 0) -> list[np.ndarray]:
    """Return int16 coloured noise whose first and last ``silent`` samples are zero."""
    random = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        sound = np.convolve(random.normal(0, 4000, length + 8), random.normal(0, 0.4, 9), "valid")
        sound[:silent] = sound[length - silent :] = 0
        made.append(sound.round().clip(-32768, 32767).astype(np.int16))
    return made


def batch(made: list[np.ndarray], speed: float) -> AudioBatch:
    length_B = np.array([len(sound) for sound in made])
    offset_B = np.cumsum([0, *length_B[:-1]])
    speed_B = np.full(len(made), speed)
    columns = (
        np.concatenate(made), length_B, offset_B, speed_B, np.ceil(length_B * speed_B).astype(np.int64), length_B
    )  # fmt: skip
    return AudioBatch(*(torch.from_numpy(column) for column in columns))


def by_dali(made: list[np.ndarray], define) -> list[tuple[np.ndarray, ...]]:
    """Return the outputs of the operators that ``define`` builds, for each sound as fp32 in [-1, 1]."""
    pipeline = dali.Pipeline(batch_size=len(made), num_threads=1, device_id=None)
    with pipeline:
        audio = dali.fn.external_source(name="audio", dtype=dali.types.FLOAT, ndim=1)
        pipeline.set_outputs(*define(audio))
    pipeline.build()
    pipeline.feed_input("audio", [(sound / 32768.0).astype(np.float32) for sound in made])
    outputs = pipeline.run()
    return [tuple(np.array(output.at(slot)) for output in outputs) for slot in range(len(made))]


def test_normalised_logarithms_equal_dalis():
    def define(audio):
        fn = dali.fn
        emphasised = fn.preemphasis_filter(audio, preemph_coeff=FACTS.preemphasis)
        spectrum = fn.spectrogram(
            emphasised,
            nfft=FACTS.fft,
            window_length=FACTS.window,
            window_step=FACTS.hop,
            window_fn=reference.hann(FACTS.window).tolist(),
        )
        mel = fn.mel_filter_bank(
            spectrum,
            sample_rate=float(FACTS.sample_rate),
            nfilter=FACTS.mel_filters,
            freq_low=FACTS.mel_min,
            freq_high=FACTS.mel_max,
        )
        logarithm = fn.to_decibels(mel, multiplier=math.log(10), reference=1.0, cutoff_db=math.log(FACTS.log_floor))
        return [fn.normalize(logarithm, axes=[1])]

    made, frames = sounds(), 34
    found_TBF, length_B = reference.features_reference(batch(made, 1.0), FACTS, frames, 240, False, torch.float32)
    for slot, (expected_MS,) in enumerate(by_dali(made, define)):
        frames_of_it = expected_MS.shape[1]
        assert frames_of_it == len(made[slot]) // FACTS.hop + 1
        assert length_B[slot] == -(-frames_of_it // FACTS.splice)
        mel_SM = found_TBF[:, slot].reshape(-1, FACTS.mel_filters)[:frames_of_it].numpy()
        np.testing.assert_allclose(mel_SM, expected_MS.T, rtol=0, atol=1e-2)


def test_slower_speech_equals_dalis():
    """Faster speech differs: in DALI, frequencies above half of the new rate alias."""
    made = sounds()
    found_BN = reference.resample(batch(made, SPEED), 20_000, FACTS, torch.float32).numpy()
    for slot, (expected,) in enumerate(by_dali(made, lambda audio: [dali.fn.audio_resample(audio, scale=SPEED)])):
        assert len(expected) == math.ceil(len(made[slot]) * SPEED)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found_BN[slot, : len(expected)], expected, rtol=0, atol=2e-3)


def test_silence_ends_within_a_window_of_dalis_end():
    made = sounds(silent=2_500)
    signal_BN = reference.resample(batch(made, 1.0), 20_000, FACTS, torch.float32)
    first_B, kept_B = reference.sounding(signal_BN, torch.tensor(LENGTHS), FACTS)
    regions = by_dali(
        made,
        lambda audio: dali.fn.nonsilent_region(audio, cutoff_db=FACTS.silence_db, window_length=FACTS.silence_window),
    )
    for slot in (0, 2):  # the remaining one has less sound than a window
        begin, length = (int(value) for value in regions[slot])
        assert abs(begin - int(first_B[slot])) <= FACTS.silence_window
        assert abs(begin + length - int(first_B[slot] + kept_B[slot])) <= FACTS.silence_window
        assert int(first_B[slot]) > 0
        assert int(first_B[slot] + kept_B[slot]) < LENGTHS[slot]


def test_noisy_ends_are_exact_where_dalis_are_not():
    """DALI's running sum restarts every 8,192 samples and rounds, so its end differs if noise is near -60 dB."""
    made = oracle.noise_tails()
    audio = batch(made, 1.0)
    signal_BN = reference.resample(audio, max(map(len, made)), FACTS, torch.float32)
    first_B, kept_B = reference.sounding(signal_BN, audio.resampled_B, FACTS)
    regions = by_dali(
        made,
        lambda sound: dali.fn.nonsilent_region(sound, cutoff_db=FACTS.silence_db, window_length=FACTS.silence_window),
    )
    others = 0
    for slot, sound in enumerate(made):
        begin, end = oracle.sounding_of_integers(sound)
        assert (int(first_B[slot]), int(first_B[slot] + kept_B[slot])) == (begin, end)
        assert int(regions[slot][0]) == begin
        others += int(regions[slot][0] + regions[slot][1]) != end
    assert 0 < others < len(made)
