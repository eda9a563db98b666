"""Prepared format of LibriSpeech: for each split one stream of audio samples, and columns of its utterances.

- ``SPLIT/audio_00000.pcm`` ...: samples, 16 bits, little-endian, 16 kHz, without a header. The files form one stream;
  no utterance spans two files.
- ``SPLIT/samples.npy``, ``token_lengths.npy``, ``tokens.npy``, ``shard_samples.npy``: attributes of
  :class:`SpeechSplit`.
- ``SPLIT/names.txt``, ``eval/transcripts.txt``: one line per utterance.
- ``tokenizer.model``, ``manifest.json``.

``SPLIT`` is ``train`` or ``eval``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.tokenizer import TranscriptTokenizer
from common.data import atomic, manifest
from common.data.manifest import Manifest
from common.data.ragged import bounds_of, starts_of
from common.errors import DataError
from common.formats import npy
from common.untrusted.regular_file import read_text

FORMAT = "librispeech-pcm/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=rnnt --raw-dir RAW --data-dir DATA"
_REMEDY = f"run '{PREPARE_COMMAND}'"
SPLITS = ("train", "eval")
TOKENIZER = "tokenizer.model"
_SPLIT_COUNTS = ("samples", "audio_samples", "longest_samples", "tokens", "longest_tokens", "shards")
COUNTS = (*(f"{split}_{count}" for split in SPLITS for count in _SPLIT_COUNTS), "vocabulary")
"""Counts in the manifest. ``samples`` are utterances; ``audio_samples`` and ``longest_samples`` are in 1/16,000 s."""
_COLUMNS = {"samples": np.int32, "token_lengths": np.int32, "tokens": np.int16, "shard_samples": np.int64}


@dataclass(frozen=True)
class SpeechSplit:
    """N utterances of a split, in the order of the corpus.

    Attributes:
        root: folder of the split.
        samples: (N,) int32, audio samples of each utterance.
        token_lengths: (N,) int32, word pieces of each utterance.
        tokens: (tokens,) int16, pieces of all utterances, concatenated.
        shard_samples: (shards,) int64, samples of each audio file.
    """

    root: Path
    samples: NDArray[np.int32]
    token_lengths: NDArray[np.int32]
    tokens: NDArray[np.int16]
    shard_samples: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(N,) offset of each utterance's audio in the stream, in samples."""
        return starts_of(self.samples)

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        """(N,) offset of each utterance's pieces in ``tokens``."""
        return starts_of(self.token_lengths)

    @cached_property
    def shard_bounds(self) -> NDArray[np.int64]:
        """(shards + 1,) offset of each file in the stream, and end of the last one, in samples."""
        return bounds_of(self.shard_samples)

    @property
    def shards(self) -> tuple[Path, ...]:
        """Paths of the audio files."""
        return tuple(self.root / shard_name(number) for number in range(len(self.shard_samples)))

    def audio(self) -> Audio:
        """Open all audio files, memory-mapped."""
        return Audio(self)

    def names(self) -> list[str]:
        """Return the name of each utterance, such as ``103-1240-0000``."""
        return _lines(self.root / "names.txt", len(self))

    def transcripts(self) -> list[str]:
        """Return the transcript of each utterance, in lower case; only for ``eval``."""
        return _lines(self.root / "transcripts.txt", len(self))

    def tokens_of(self, utterance: int) -> NDArray[np.int16]:
        """Return the pieces of one utterance, (U,)."""
        first = self.token_offsets[utterance]
        return self.tokens[first : first + self.token_lengths[utterance]]


class Audio:
    """Memory-mapped audio of a split, indexed by utterance."""

    def __init__(self, split: SpeechSplit) -> None:
        self._split = split
        self._files = [np.memmap(path, "<i2", "r") for path in split.shards]

    def __getitem__(self, utterance: int) -> NDArray[np.int16]:
        """Return a view of one utterance, (samples,) int16; it is read from disk only when used."""
        split = self._split
        first = split.offsets[utterance]
        shard = int(np.searchsorted(split.shard_bounds, first, "right")) - 1
        start = int(first - split.shard_bounds[shard])
        return self._files[shard][start : start + int(split.samples[utterance])]


@dataclass(frozen=True)
class PreparedSpeech:
    """A prepared folder."""

    root: Path
    manifest: Manifest

    @property
    def synthetic(self) -> bool:
        """Whether the data are synthetic or reduced."""
        return self.manifest.synthetic

    @property
    def vocabulary(self) -> int:
        """Pieces of the tokenizer, without the blank, which follows them."""
        return self.manifest.counts["vocabulary"]

    def require_vocabulary(self, pieces: int) -> None:
        """Raise :class:`DataError` unless the tokenizer has this number of pieces."""
        if self.vocabulary != pieces:
            raise DataError(
                f"{self.root} was prepared with a tokenizer of {self.vocabulary} pieces, but the model has {pieces}; "
                f"prepare it again with --vocabulary {pieces}"
            )

    def tokenizer(self) -> TranscriptTokenizer:
        """Return the tokenizer; raises :class:`DataError` if its file is damaged."""
        return TranscriptTokenizer(self.root / TOKENIZER, self.vocabulary)

    def split(self, name: str) -> SpeechSplit:
        """Return the utterances of ``train`` or ``eval``; raises :class:`DataError` if a file is damaged."""
        counts = self.manifest.counts
        sizes = {column: counts[f"{name}_{column}"] for column in ("samples", "tokens")}
        sizes["token_lengths"], sizes["shard_samples"] = sizes["samples"], counts[f"{name}_shards"]
        columns: dict[str, Any] = {
            column: npy.required(self.root / name / f"{column}.npy", np.dtype(dtype), (sizes[column],), _REMEDY)
            for column, dtype in _COLUMNS.items()
        }
        split = SpeechSplit(self.root / name, **columns)
        for what, found, wanted in (
            ("samples of audio", int(split.samples.sum(dtype=np.int64)), int(split.shard_samples.sum())),
            ("pieces", int(split.token_lengths.sum(dtype=np.int64)), len(split.tokens)),
        ):
            if found != wanted:
                raise DataError(f"{split.root}: the lengths add up to {found} {what}, expected {wanted}; {_REMEDY}")
        return split


def open_prepared(root: Path) -> PreparedSpeech:
    """Open a prepared folder; raises :class:`DataError` unless manifest and files are complete."""
    return PreparedSpeech(root, manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def shard_name(number: int) -> str:
    """Return the name of an audio file."""
    return f"audio_{number:05d}.pcm"


def write_split(
    folder: Path,
    columns: Mapping[str, NDArray[Any]],
    names: Sequence[str],
    transcripts: Sequence[str] | None,
) -> list[Path]:
    """Write the files of a split except its audio, and return their paths.

    Args:
        columns: arrays by the names of :class:`SpeechSplit`'s attributes.
        transcripts: one per utterance; None: write no transcripts.
    """
    made = []
    for name, dtype in _COLUMNS.items():
        made.append(folder / f"{name}.npy")
        atomic.save(made[-1], columns[name].astype(dtype, casting="same_kind"))
    for name, lines in (("names.txt", names), ("transcripts.txt", transcripts)):
        if lines is not None:
            made.append(folder / name)
            atomic.write_text(made[-1], "".join(f"{line}\n" for line in lines))
    return made


def _lines(path: Path, count: int) -> list[str]:
    try:
        lines = read_text(path, 2**28).splitlines()
    except DataError as error:
        raise DataError(f"{path} cannot be read: {error}; {_REMEDY}") from error
    if len(lines) != count:
        raise DataError(f"{path} has {len(lines)} lines, expected {count}; {_REMEDY}")
    return lines
