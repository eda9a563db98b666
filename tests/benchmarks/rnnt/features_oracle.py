"""Features by their definition, one utterance at a time, in float64, with NumPy and PyTorch's ``stft``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.rnnt.ops.features.reference import AudioBatch

WINDOW, HOP, LOBES = 2048, 160, 16


def utterances(lengths: Sequence[int], speeds: Sequence[float], silent: float = 0.1, seed: int = 0) -> AudioBatch:
    """Return utterances of coloured noise, with a silent fraction ``silent`` at each end, and loud gaps between."""
    random = np.random.default_rng(seed)
    offsets = np.cumsum([3, *[length + 5 for length in lengths[:-1]]])
    audio = np.full(offsets[-1] + lengths[-1] + 9, 30000, np.int16)
    for offset, length in zip(offsets, lengths, strict=True):
        sound = np.convolve(random.normal(0, 4000, length + 8), random.normal(0, 0.4, 9), "valid")
        edge = int(length * silent)
        sound[:edge] = random.normal(0, 0.4, edge)
        sound[length - edge :] = random.normal(0, 0.4, edge)
        audio[offset : offset + length] = sound.round().clip(-32768, 32767)
    speed_B, length_B = np.array(speeds, np.float64), np.array(lengths, np.int64)
    resampled_B = [math.ceil(length * speed) for length, speed in zip(lengths, speeds, strict=True)]
    columns = (audio, length_B, offsets.astype(np.int64), speed_B, np.array(resampled_B), 7 + np.arange(len(lengths)))
    return AudioBatch(*(torch.from_numpy(column) for column in columns))


def recorded(audio: AudioBatch, slot: int) -> np.ndarray:
    """Return the samples of one utterance, in [-1, 1]."""
    first = int(audio.offset_B[slot])
    return audio.audio_A[first : first + int(audio.length_B[slot])].numpy() / 32768.0


def resampled(sound: np.ndarray, speed: float) -> np.ndarray:
    """Resample by the sum over all samples, each times the filter at its distance."""
    cut = min(1.0, speed)
    positions = np.arange(math.ceil(len(sound) * speed)) / speed
    made = np.empty(len(positions))
    for first in range(0, len(positions), 512):
        distance = cut * (positions[first : first + 512, None] - np.arange(len(sound)))
        envelope = np.where(np.abs(distance) < LOBES, 0.5 * (1 + np.cos(np.pi * distance / LOBES)), 0.0)
        made[first : first + 512] = (cut * np.sinc(distance) * envelope) @ sound
    return made


def sounding(sound: np.ndarray) -> tuple[int, int]:
    """Return the first sample and the number of samples between silences."""
    if len(sound) < WINDOW:
        return 0, len(sound)
    power = np.lib.stride_tricks.sliding_window_view(sound**2, WINDOW).sum(1)
    if not power.max():
        return 0, len(sound)
    loud = np.flatnonzero(power >= power.max() * 1e-6)
    return int(loud[0]), int(loud[-1] + WINDOW - loud[0])


def noise_tails() -> list[np.ndarray]:
    """Return int16 utterances that end with noise 63 to 57 dB below the speech, where trimming is hardest."""
    random = np.random.default_rng(1)
    made = []
    for decibels in (-63, -62, -61, -60.5, -60, -59.5, -59, -58, -57) * 2:
        lead, speech, tail = random.integers(3000, 6000), random.integers(9000, 14000), random.integers(6000, 12000)
        deviations = ((0.4, lead), (4000, speech), (4000 * 10 ** (decibels / 20), tail))
        sound = np.concatenate([random.normal(0, deviation, count) for deviation, count in deviations])
        made.append(sound.round().clip(-32768, 32767).astype(np.int16))
    return made


def sounding_of_integers(sound: np.ndarray) -> tuple[int, int]:
    """Return the first sample and the end of the sound between silences of an int16 utterance, without rounding."""
    sums = np.concatenate([[0], np.cumsum(sound.astype(np.int64) ** 2)])
    power = sums[WINDOW:] - sums[:-WINDOW]
    loud = np.flatnonzero(power * 10**6 >= power.max())
    return int(loud[0]), int(loud[-1] + WINDOW)


def log_mel(sound: np.ndarray) -> np.ndarray:
    """Return the logarithm of the power in the mel filters after pre-emphasis, (frames, 80)."""
    emphasised = sound - 0.97 * np.concatenate([sound[:1], sound[:-1]])
    spectrum = torch.stft(
        torch.from_numpy(emphasised), 512, HOP, 320, torch.hann_window(320, dtype=torch.float64), return_complex=True
    )
    return np.log(np.maximum(spectrum.abs().square().numpy().T @ filters().T, 1e-20))


def filters() -> np.ndarray:
    """Return the triangular filters on Slaney's scale, (80, 257), one value at a time."""

    def mel(hz: float) -> float:
        return 3 * hz / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)

    def hz(mel: float) -> float:
        return 200 * mel / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)

    corners = [hz(mel(8000) * corner / 81) for corner in range(82)]
    made = np.zeros((80, 257))
    for band in range(80):
        low, peak, high = corners[band : band + 3]
        for bin_ in range(257):
            frequency = bin_ * 16000 / 512
            if low < frequency <= peak:
                made[band, bin_] = (frequency - low) / (peak - low) * 2 / (high - low)
            elif peak < frequency < high:
                made[band, bin_] = (high - frequency) / (high - peak) * 2 / (high - low)
    return made


def features(audio: AudioBatch, slot: int) -> np.ndarray:
    """Return the features of one utterance without noise and masks, (spliced frames, 240)."""
    sound = resampled(recorded(audio, slot), float(audio.speed_B[slot]))
    first, kept = sounding(sound)
    mel = log_mel(sound[first : first + kept])
    mel = (mel - mel.mean(0)) / mel.std(0)
    return np.concatenate([mel, np.zeros((-len(mel) % 3, 80))]).reshape(-1, 240)
