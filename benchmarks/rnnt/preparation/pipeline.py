"""Stages from FLAC files and transcripts to prepared files. Every stage resumes after an interruption.

The stages are: tokenizer of the training transcripts; files of samples, each for a range of utterances; columns of
all utterances.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt import tokenizer as tokenizers
from benchmarks.rnnt.preparation import flac
from benchmarks.rnnt.prepared import SPLITS, TOKENIZER, shard_name, write_split
from benchmarks.rnnt.raw import Utterance
from benchmarks.rnnt.tokenizer import UNKNOWN, TranscriptTokenizer
from common.data import atomic, preparation
from common.data.manifest import FileEntry, describe_files
from common.data.stages import Record, Stages
from common.errors import DataError

SHARD_BYTES = 128 << 20
"""Bytes of FLAC per file of samples, which becomes about twice as large: some 500 files for LibriSpeech."""
SMALLEST_SHARD_BYTES = 1 << 20
FEWEST_SHARDS = 32
GROWTH = 2.2
"""Maximum bytes of samples per byte of FLAC; LibriSpeech has 1.8."""
_INT16 = 2
_ENCODED_AT_ONCE = 16_384


@dataclass(frozen=True)
class PreparedCorpus:
    """Files in the data folder, and counts for the manifest."""

    files: dict[str, FileEntry]
    counts: dict[str, int]


class SpeechPipeline:
    """Preparation of tokenizer, audio files and columns of LibriSpeech, in stages that resume after an interruption.

    Args:
        utterances: utterances of each split.
        data_dir: receives the files.
        work_dir: receives the records of the stages.
        vocabulary: pieces of the tokenizer.
        model: file of an existing tokenizer; None: train one.
        workers: number of processes.
    """

    def __init__(
        self,
        utterances: Mapping[str, list[Utterance]],
        data_dir: Path,
        work_dir: Path,
        vocabulary: int,
        model: Path | None,
        workers: int,
    ) -> None:
        self.utterances = utterances
        self.data_dir = data_dir
        self.vocabulary = vocabulary
        self.model = model
        self.stages = Stages(work_dir / "records", workers)
        self.workers = workers

    def run(self) -> PreparedCorpus:
        """Run all unfinished stages.

        Raises:
            DataError: a FLAC file is damaged or of another kind, a transcript has text that the tokenizer does not
                know, or the disk is too small.
        """
        runs = {split: list(runs_of(self.utterances[split])) for split in SPLITS}
        self._require_space(runs)
        with self.stages:
            tokenizer = self._tokenizer()
            shards = {split: self._shards(split, runs[split]) for split in SPLITS}
        names = [TOKENIZER]
        files: dict[str, FileEntry] = {}
        counts: dict[str, int] = {}
        for split in SPLITS:
            columns = self._columns(split, tokenizer, shards[split])
            names += self._written(split, columns)
            files |= self._entries(split, shards[split])
            counts |= _counts(split, columns)
        files |= describe_files(self.data_dir, names)
        return PreparedCorpus(files, {**counts, "vocabulary": tokenizer.size})

    def _require_space(self, runs: Mapping[str, list[list[Utterance]]]) -> None:
        """Check the disk space for all missing files of samples."""
        left = [
            utterance.bytes
            for split in SPLITS
            for number, run in enumerate(runs[split])
            if not self.stages.path(split, shard_name(number)).exists()
            for utterance in run
        ]
        preparation.require_space(self.data_dir, int(sum(left) * GROWTH))

    def _tokenizer(self) -> TranscriptTokenizer:
        arguments = (self.utterances["train"], self.vocabulary, self.model, self.data_dir / TOKENIZER)
        self.stages.run("tokenizer", {TOKENIZER: arguments}, make_tokenizer)
        return TranscriptTokenizer(self.data_dir / TOKENIZER, self.vocabulary)

    def _shards(self, split: str, runs: list[list[Utterance]]) -> dict[str, Record]:
        tasks = {
            shard_name(number): ([utterance.path for utterance in run], self.data_dir / split / shard_name(number))
            for number, run in enumerate(runs)
        }
        return self.stages.run(split, tasks, write_shard)

    def _columns(
        self, split: str, tokenizer: TranscriptTokenizer, shards: Mapping[str, Record]
    ) -> dict[str, NDArray[Any]]:
        utterances = self.utterances[split]
        tokens, lengths = self._encoded(utterances, tokenizer)
        if split == "train" and (unknown := tokens == UNKNOWN).any():
            culprit = utterances[int(np.searchsorted(np.cumsum(lengths), unknown.argmax(), "right"))]
            raise DataError(
                f"{culprit.path}: the tokenizer, which was made of other transcripts, knows not all of "
                f"{culprit.transcript!r}"
            )
        return {
            "samples": np.array([count for record in shards.values() for count in record["samples"]], np.int32),
            "token_lengths": lengths,
            "tokens": tokens,
            "shard_samples": np.array([sum(record["samples"]) for record in shards.values()], np.int64),
        }

    def _encoded(
        self, utterances: Sequence[Utterance], tokenizer: TranscriptTokenizer
    ) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
        """Return the pieces of all transcripts, and the number of each."""
        tokens, lengths = [], []
        for first in range(0, len(utterances), _ENCODED_AT_ONCE):
            texts = [utterance.transcript for utterance in utterances[first : first + _ENCODED_AT_ONCE]]
            pieces = tokenizer.encode(texts, self.workers)
            lengths.append(np.array([len(sequence) for sequence in pieces], np.int32))
            tokens.append(np.fromiter(itertools.chain.from_iterable(pieces), np.int16))
        return np.concatenate(tokens), np.concatenate(lengths)

    def _written(self, split: str, columns: Mapping[str, NDArray[Any]]) -> list[str]:
        utterances = self.utterances[split]
        transcripts = [utterance.transcript for utterance in utterances] if split == "eval" else None
        names = [utterance.name for utterance in utterances]
        made = write_split(self.data_dir / split, columns, names, transcripts)
        return [str(path.relative_to(self.data_dir)) for path in made]

    def _entries(self, split: str, shards: Mapping[str, Record]) -> dict[str, FileEntry]:
        made = {}
        for name, record in shards.items():
            path, size = self.data_dir / split / name, _INT16 * sum(record["samples"])
            if not path.is_file() or path.stat().st_size != size:
                raise DataError(f"{path} is not as it was prepared; delete {self.data_dir} and prepare again")
            made[f"{split}/{name}"] = FileEntry(size, record["sha256"])
        return made


def runs_of(utterances: Sequence[Utterance]) -> Iterator[list[Utterance]]:
    """Yield ranges of utterances with about equal bytes, one per file of samples; depends only on the utterances."""
    total = sum(utterance.bytes for utterance in utterances)
    wanted = min(SHARD_BYTES, max(SMALLEST_SHARD_BYTES, total // FEWEST_SHARDS))
    run: list[Utterance] = []
    size = 0
    for utterance in utterances:
        run.append(utterance)
        size += utterance.bytes
        if size >= wanted:
            yield run
            run, size = [], 0
    if run:
        yield run


def make_tokenizer(utterances: Sequence[Utterance], vocabulary: int, model: Path | None, path: Path) -> Record:
    """Train a tokenizer with ``vocabulary`` pieces, or copy the file ``model``, to ``path``.

    Raises:
        DataError: the transcripts do not suffice for the vocabulary, or ``model`` has another one or is damaged.
    """
    if model is not None:
        TranscriptTokenizer(model, vocabulary)  # checks the vocabulary
        with atomic.written(path) as partial:
            shutil.copyfile(model, partial)
    else:
        trained = tokenizers.train((utterance.transcript for utterance in utterances), vocabulary)
        with atomic.written(path) as partial:
            partial.write_bytes(trained)
    return {"pieces": vocabulary}


def write_shard(flacs: Sequence[str], path: Path) -> Record:
    """Write the concatenated samples of some FLAC files to ``path``.

    Raises:
        DataError: a file is damaged or of another kind.
    """
    digest = hashlib.sha256()
    samples = []
    with atomic.written(path) as partial, open(partial, "wb") as out:
        for name in flacs:
            content = flac.read(Path(name)).astype("<i2", copy=False).data
            digest.update(content)
            out.write(content)
            samples.append(len(content))
    return {"samples": samples, "sha256": digest.hexdigest()}


def _counts(split: str, columns: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    samples, lengths = columns["samples"], columns["token_lengths"]
    return {
        f"{split}_samples": len(samples),
        f"{split}_audio_samples": int(samples.sum(dtype=np.int64)),
        f"{split}_longest_samples": int(samples.max()),
        f"{split}_tokens": len(columns["tokens"]),
        f"{split}_longest_tokens": int(lengths.max()),
        f"{split}_shards": len(columns["shard_samples"]),
    }
