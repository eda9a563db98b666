"""Reader of LibriSpeech's FLAC files, with checks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from common.errors import DataError

SAMPLE_RATE = 16_000
"""Sample rate of the corpus in Hz."""
MOST_SAMPLES = 3600 * SAMPLE_RATE
"""Maximum samples of a file, one hour. A tiny FLAC file can hold hours of silence; LibriSpeech has at most 35 s."""
_STREAM_INFO_BYTES = 42
_MD5 = slice(26, 42)
_REMEDY = "unpack its archive again"


def read(path: Path) -> NDArray[np.int16]:
    """Return the samples of a FLAC file with one channel, 16 bits and 16 kHz, (samples,).

    The first block of a FLAC file has the number of samples and their MD5 (RFC 9639, section 8.2).

    Raises:
        DataError: the file is missing, truncated, damaged, or of another kind.
    """
    try:
        with soundfile.SoundFile(path) as file:
            _check_kind(path, file)
            promised = file.frames
            samples: NDArray[np.int16] = file.read(dtype="int16")
        with open(path, "rb") as opened:
            head = opened.read(_STREAM_INFO_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {_REMEDY}") from error
    except soundfile.LibsndfileError as error:
        raise DataError(f"{path} is no FLAC file, or a damaged one ({error.error_string}); {_REMEDY}") from error
    if len(samples) != promised:
        raise DataError(f"{path} is truncated: {len(samples)} of {promised} samples; {_REMEDY}")
    if not len(samples):
        raise DataError(f"{path} holds no samples; {_REMEDY}")
    known = head[_MD5]
    if any(known) and hashlib.md5(samples.astype("<i2", copy=False).data).digest() != known:
        raise DataError(f"{path} is damaged: its samples have another MD5 than it says; {_REMEDY}")
    return samples


def _check_kind(path: Path, file: soundfile.SoundFile) -> None:
    if file.format != "FLAC" or file.subtype != "PCM_16":
        raise DataError(f"{path} is {file.format} of {file.subtype}, expected FLAC of PCM_16")
    if file.samplerate != SAMPLE_RATE:
        raise DataError(f"{path} has a sample rate of {file.samplerate} Hz, expected {SAMPLE_RATE}")
    if file.channels != 1:
        raise DataError(f"{path} has {file.channels} channels, expected one")
    if file.frames > MOST_SAMPLES:
        raise DataError(f"{path} has {file.frames:,} samples, and at most {MOST_SAMPLES:,} are read; {_REMEDY}")
