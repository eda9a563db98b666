"""LibriSpeech's layout, written by hand: random samples in FLAC, and transcripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import soundfile

VOCABULARY = 24
TEXTS = {
    "train-clean-100/19/198": ["THE RIVER RUNS", "IT'S A RIVER"],
    "train-clean-100/103/1240": ["A MILL STANDS BY THE RIVER"],
    "train-clean-360/14/208": ["THE MILL RUNS", "THE MILLER STANDS STILL"],
    "train-other-500/20/205": ["THAT IS ALL", "A RIVER", "THE MILL"],
    "dev-clean/84/121": ["THE MILLER RUNS", "ALL STANDS STILL"],
}


def samples_of(name: str) -> np.ndarray:
    """(N,) int16, what is in the file of the utterance ``name``."""
    random = np.random.default_rng([ord(letter) for letter in name])
    return random.integers(-20_000, 20_000, int(random.integers(1_000, 9_000))).astype(np.int16)


def write_flac(path: Path, samples: np.ndarray, rate: int = 16_000) -> None:
    """Write ``samples``, of one channel or of several."""
    soundfile.write(path, samples, rate, format="FLAC", subtype="PCM_16")


def write(raw_dir: Path, texts: Mapping[str, list[str]] = TEXTS, stand_in: bool = True) -> Path:
    """Write chapters with ``texts`` below ``raw_dir``, and mark them as a stand-in."""
    for place, lines in texts.items():
        folder = raw_dir / "LibriSpeech" / place
        folder.mkdir(parents=True)
        speaker, chapter = place.split("/")[1:]
        written = []
        for number, text in enumerate(lines):
            name = f"{speaker}-{chapter}-{number:04d}"
            write_flac(folder / f"{name}.flac", samples_of(name))
            written.append(f"{name} {text}\n")
        (folder / f"{speaker}-{chapter}.trans.txt").write_text("".join(written))
    if stand_in:
        (raw_dir / "STAND_IN").write_text(json.dumps({"vocabulary": VOCABULARY}))
    return raw_dir
