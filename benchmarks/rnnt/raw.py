"""LibriSpeech's layout: ``LibriSpeech/SUBSET/SPEAKER/CHAPTER`` has a FLAC file for each utterance of a chapter.

The file ``SPEAKER-CHAPTER.trans.txt`` beside them has a line for each utterance: name and transcript, in capitals.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.data.synthetic import MARKER, description_of
from common.errors import ConfigError, DataError
from common.formats.raw_files import is_data, listed
from common.untrusted.regular_file import read_text

FOLDER = "LibriSpeech"
TRAIN_SUBSETS = ("train-clean-100", "train-clean-360", "train-other-500")
EVAL_SUBSET = "dev-clean"
ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz' ")
"""Letters of transcripts, after conversion to lower case."""
VOCABULARY = 1023
"""Pieces of the benchmark's tokenizer, without the blank."""


class Utterance(NamedTuple):
    """One FLAC file and its transcript.

    Attributes:
        name: name of the utterance, such as ``103-1240-0000``.
        folder: folder of its chapter.
        transcript: text in lower case.
    """

    name: str
    folder: str
    transcript: str
    bytes: int

    @property
    def path(self) -> str:
        """Path of the FLAC file."""
        return os.path.join(self.folder, f"{self.name}.flac")


@dataclass(frozen=True)
class RawSpeech:
    """Raw data of a preparation.

    Attributes:
        root: folder of the subsets.
        subsets: names of the subsets by split.
        synthetic: content of the file ``SYNTHETIC`` of synthetic data; None for LibriSpeech.
    """

    root: Path
    subsets: dict[str, tuple[str, ...]]
    synthetic: dict[str, Any] | None

    def utterances(self, split: str) -> list[Utterance]:
        """Return all utterances of ``split`` (``train`` or ``eval``), by subset, then by speaker, chapter and file.

        Raises:
            DataError: a transcript or a file is missing, or a transcript has a letter outside the alphabet.
        """
        found: list[Utterance] = []
        for subset in self.subsets[split]:
            utterances = list(_subset(self.root / subset))
            if not utterances:
                raise DataError(f"{self.root / subset} holds no utterance; unpack its archive again")
            found += utterances
        return found


def open_raw(raw_dir: Path, train_subsets: Sequence[str] | None = None) -> RawSpeech:
    """Find the subsets in ``raw_dir``, or in its folder ``LibriSpeech``.

    Args:
        train_subsets: subsets for training; None for the benchmark's three, or those that synthetic data have.

    Raises:
        ConfigError: a training subset is named twice or unknown.
        DataError: the folder or a subset is missing, or ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(
            f"raw folder {raw_dir} does not exist; run 'mlperf-suite download benchmark=rnnt' or '... generate ...'"
        )
    root = raw_dir / FOLDER if (raw_dir / FOLDER).is_dir() else raw_dir
    synthetic = description_of(raw_dir.parent if raw_dir.name == FOLDER else raw_dir)
    if train_subsets is None:
        train_subsets = TRAIN_SUBSETS
        if synthetic is not None:
            train_subsets = [subset for subset in TRAIN_SUBSETS if (root / subset).is_dir()] or TRAIN_SUBSETS[:1]
    if not train_subsets or len(set(train_subsets)) < len(train_subsets) or set(train_subsets) - set(TRAIN_SUBSETS):
        raise ConfigError(f"--train-subsets {' '.join(train_subsets)}: some of {', '.join(TRAIN_SUBSETS)}, once each")
    subsets = {"train": tuple(train_subsets), "eval": (EVAL_SUBSET,)}
    for names in subsets.values():
        for name in names:
            if not (root / name).is_dir():
                raise DataError(
                    f"{root / name} is missing; 'mlperf-suite download benchmark=rnnt' fetches and unpacks it"
                )
    return RawSpeech(root, subsets, synthetic)


def vocabulary_of(source: RawSpeech) -> int:
    """Return the number of the tokenizer's pieces: the benchmark's 1,023, or for synthetic data that in ``SYNTHETIC``.

    Raises:
        DataError: ``SYNTHETIC`` has no valid number.
    """
    if source.synthetic is None:
        return VOCABULARY
    try:
        return int(source.synthetic["vocabulary"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{MARKER} above {source.root} has a missing or invalid vocabulary: {error}") from error


def fingerprint(utterances: Iterable[Utterance]) -> str:
    """Return the SHA-256 of names, transcripts and file sizes, which determine the prepared data; folders do not."""
    digest = hashlib.sha256()
    for name, _, transcript, size in utterances:
        digest.update(f"{name}\t{size}\t{transcript}\n".encode())
    return digest.hexdigest()


def _subset(folder: Path) -> Iterator[Utterance]:
    for speaker in filter(Path.is_dir, listed(folder)):
        for chapter in filter(Path.is_dir, listed(speaker)):
            yield from _chapter(chapter, f"{speaker.name}-{chapter.name}.trans.txt")


def _chapter(folder: Path, transcripts: str) -> list[Utterance]:
    """Return the utterances of one chapter, sorted by name."""
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.name.endswith(".flac") and is_data(entry.name)]
        sizes = {entry.name: entry.stat().st_size for entry in files}
    path = folder / transcripts
    if not path.exists():
        raise DataError(f"{path} is missing: the transcripts of the chapter's {len(sizes)} files")
    lines = read_text(path, remedy="unpack its archive again").splitlines()
    found: dict[str, Utterance] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, _, text = line.partition(" ")
        where = f"{path}, line {number}"
        transcript = _transcript(text, where)
        size = sizes.pop(f"{name}.flac", None)
        if name in found:
            raise DataError(f"{where}: a second transcript of {name}")
        if size is None:
            raise DataError(
                f"{where}: the transcript of {folder / name}.flac, which is missing; unpack its archive again"
            )
        found[name] = Utterance(name, str(folder), transcript, size)
    if sizes:
        raise DataError(f"{folder / min(sizes)} has no transcript in {path}; unpack its archive again")
    return [found[name] for name in sorted(found)]


def _transcript(text: str, where: str) -> str:
    transcript = text.lower().strip()
    if not transcript:
        raise DataError(f"{where}: an empty transcript")
    if strange := sorted(set(transcript) - ALPHABET):
        raise DataError(f"{where}: {strange[0]!r} is outside the alphabet, which is a to z, apostrophe and space")
    return transcript
