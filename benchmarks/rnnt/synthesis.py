"""Speech synthesis for synthetic data: letters are pairs of formants, spoken by voices.

A voice emits pulses at its pitch, and each pulse rings at the two formant frequencies of the letter. Formants glide
from letter to letter, each letter has a duration, a space is a short pause, and there is background noise. It does
not sound like English, but like in speech, the text can be recognised from the spectrum.

Shapes: N samples, L letters of a text, P pulses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_FIRST_HZ = (280.0, 380.0, 510.0, 680.0, 900.0)
_SECOND_HZ = (1150.0, 1450.0, 1850.0, 2350.0, 2950.0, 3700.0)
_VOWELS = "aeiou"
_LETTER_S, _VOWEL_S, _SPACE_S = 0.065, 0.085, 0.055
_GLIDE_S = 0.02
"""Seconds between two letters in which formants glide and the voice is quieter, so that double letters are audible."""
_BETWEEN = 0.35
_PAUSE = 0.003
"""Loudness relative to the voice: ``_BETWEEN`` between two letters, ``_PAUSE`` at a space."""
_FIRST_DECAY, _SECOND_DECAY = 2 * math.pi * 45.0, 2 * math.pi * 70.0
"""Decay of a pulse's ringing, in 1/s: pi times the formants' bandwidths, 90 and 140 Hz."""
_LOUDNESS = 6000.0
_SLURRED = 0.08
"""Relative variation of a letter's duration."""


@dataclass(frozen=True)
class Voice:
    """A speaker.

    Attributes:
        pitch: fundamental frequency in Hz.
        tempo: factor of the letters' durations.
        tract: factor of the formants.
        noise: loudness of the background noise in dB, relative to the voice.
        silence: minimum and maximum seconds of silence before and after the speech.
    """

    pitch: float
    tempo: float
    tract: float
    noise: float
    silence: tuple[float, float]


def draw_voice(random: np.random.Generator) -> Voice:
    """Return a random voice. Some have so little noise that the ends of an utterance count as silence."""
    return Voice(
        pitch=float(random.uniform(90.0, 220.0)),
        tempo=float(random.uniform(0.85, 1.15)),
        tract=float(random.uniform(0.97, 1.03)),
        noise=float(random.uniform(-75.0, -40.0)),
        silence=(0.1, 0.4),
    )


def speak(text: str, voice: Voice, random: np.random.Generator, seconds: float | None = None) -> NDArray[np.int16]:
    """Return the spoken ``text`` between two silences, (N,) int16, at 16 kHz.

    Args:
        text: letters, apostrophes and spaces, in lower case.
        random: generator for durations, melody and noise.
        seconds: total duration; None: determined by the voice's tempo.
    """
    before, after = random.uniform(*voice.silence, 2)
    length_L = _usual_lengths(text) * random.uniform(1 - _SLURRED, 1 + _SLURRED, len(text))
    if seconds is None:
        length_L *= voice.tempo
        seconds = before + float(length_L.sum()) + after
    else:
        before, after = min(before, 0.1 * seconds), min(after, 0.1 * seconds)
        length_L *= (seconds - before - after) / length_L.sum()
    samples = round(seconds * SAMPLE_RATE)
    spoken_N = _spoken(text, before + np.concatenate([[0.0], np.cumsum(length_L)]), voice, samples, random)
    noise = _LOUDNESS * 10 ** (voice.noise / 20)
    spoken_N += random.standard_normal(samples, np.float32) * np.float32(noise)
    return np.clip(np.rint(spoken_N), -32768, 32767).astype(np.int16)


def _spoken(
    text: str, bounds: NDArray[np.float64], voice: Voice, samples: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """Return the letters between the times ``bounds`` (L + 1,) in seconds, and zeros outside, (N,)."""
    phase_N = np.cumsum(_melody(voice.pitch, samples, random), dtype=np.float64)
    pulse_N = phase_N.astype(np.int32)
    first_P = np.flatnonzero(np.diff(pulse_N, prepend=-1))  # sample at which each pulse begins
    since_N = (np.arange(samples, dtype=np.int32) - first_P[pulse_N]).astype(np.float32) / np.float32(SAMPLE_RATE)
    formants, loudness_P = _tracks(text, bounds, first_P / SAMPLE_RATE)
    spoken_N = np.zeros(samples, np.float32)
    for formant_P, decay, share in zip(formants, (_FIRST_DECAY, _SECOND_DECAY), (1.0, 0.7), strict=True):
        angle_N = since_N * (2 * math.pi * voice.tract * formant_P).astype(np.float32)[pulse_N]
        ringing_N = np.exp(since_N * np.float32(-decay))
        ringing_N *= np.sin(angle_N, out=angle_N)
        ringing_N *= np.float32(share)
        spoken_N += ringing_N
    spoken_N *= (_LOUDNESS * loudness_P).astype(np.float32)[pulse_N]
    return spoken_N


def _melody(pitch: float, samples: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Return the pulses per sample, (N,) float32: the pitch rises and falls twice a second."""
    time_N = np.arange(samples, dtype=np.float32) / np.float32(SAMPLE_RATE)
    wave_N = np.sin(time_N * np.float32(2 * math.pi * 2.0) + np.float32(random.uniform(0, 2 * math.pi)))
    melody_N: NDArray[np.float32] = (1 + np.float32(0.08) * wave_N) * np.float32(pitch / SAMPLE_RATE)
    return melody_N


def _tracks(
    text: str, bounds: NDArray[np.float64], time_P: NDArray[np.float64]
) -> tuple[tuple[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]:
    """Return the two formants (Hz) and the loudness at each time ``time_P``.

    A space has the formants of the letter before it, so that they glide only when the voice is back.
    """
    pairs_L2 = np.zeros((len(text), 2))
    last = (_FIRST_HZ[0], _SECOND_HZ[0])
    for index, letter in enumerate(text):
        last = last if letter == " " else formants_of(letter)
        pairs_L2[index] = last
    spoken_L = np.array([letter != " " for letter in text])
    starts_L, ends_L = bounds[:-1], bounds[1:]
    glide_L = np.minimum(_GLIDE_S / 2, (ends_L - starts_L) / 4)
    knots = np.stack([starts_L + glide_L, ends_L - glide_L], 1).ravel()
    first_P, second_P = (np.interp(time_P, knots, np.repeat(pairs_L2[:, which], 2)) for which in (0, 1))
    level_L = np.where(spoken_L, 1.0, _PAUSE)
    between_L = np.minimum(level_L[:-1], level_L[1:]) * _BETWEEN
    times = np.concatenate([knots, bounds[1:-1], bounds[[0, -1]]])
    levels = np.concatenate([np.repeat(level_L, 2), between_L, [0.0, 0.0]])
    order = np.argsort(times, kind="stable")
    return (first_P, second_P), np.interp(time_P, times[order], levels[order])


def formants_of(letter: str) -> tuple[float, float]:
    """Return the two frequencies of a letter in Hz; each letter has a different pair."""
    index = LETTERS.index(letter)  # 5 and 6 have no common factor, so the pairs of up to 30 letters differ
    return _FIRST_HZ[index % len(_FIRST_HZ)], _SECOND_HZ[index % len(_SECOND_HZ)]


def _usual_lengths(text: str) -> NDArray[np.float64]:
    """Return the duration of each letter in seconds, (L,)."""
    return np.array([_SPACE_S if letter == " " else _VOWEL_S if letter in _VOWELS else _LETTER_S for letter in text])
