"""Download, prepare, verify and generate the data of RNN-T: LibriSpeech as samples and word pieces.

:mod:`benchmarks.rnnt.raw` describes the input, :mod:`benchmarks.rnnt.prepared` the output. The stages of a preparation
are: tokenizer of the training transcripts; files of samples, each for a range of utterances; columns of all utterances.
Every stage resumes after an interruption.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from benchmarks.rnnt import raw
from benchmarks.rnnt import tokenizer as tokenizers
from benchmarks.rnnt.prepared import FORMAT, PREPARE_COMMAND, SPLITS, TOKENIZER, shard_name, write_split
from benchmarks.rnnt.raw import TRAIN_SUBSETS, VOCABULARY, Utterance
from benchmarks.rnnt.synthetic import generate
from benchmarks.rnnt.tokenizer import UNKNOWN, TranscriptTokenizer
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest, describe_files, digest
from common.data.options import Option
from common.data.preparation import preparing
from common.data.published import Published
from common.data.stages import Record, Stages
from common.errors import ConfigError, DataError

WORK = "intermediate"
LARGEST_VOCABULARY = 32_767
"""Maximum number of pieces, because they are stored in 16 bits."""
PUBLISHED = Published({"train_samples": 281_241, "eval_samples": 2_703, "vocabulary": VOCABULARY})
"""Utterances of the corpus's three training subsets and of dev-clean, and pieces of the benchmark's tokenizer."""
SHARD_BYTES = 128 << 20
"""Bytes of FLAC per file of samples, which becomes about twice as large: some 500 files for LibriSpeech."""
SMALLEST_SHARD_BYTES = 1 << 20
FEWEST_SHARDS = 32
GROWTH = 2.2
"""Maximum bytes of samples per byte of FLAC; LibriSpeech has 1.8."""
_INT16 = 2
_ENCODED_AT_ONCE = 16_384
SAMPLE_RATE = 16_000
"""Sample rate of the corpus in Hz."""
MOST_SAMPLES = 3600 * SAMPLE_RATE
"""Maximum samples of a file, one hour. A tiny FLAC file can hold hours of silence; LibriSpeech has at most 35 s."""
_STREAM_INFO_BYTES = 42
_MD5 = slice(26, 42)
_REMEDY = "unpack its archive again"


def prepare(
    raw_dir: Path,
    data_dir: Path,
    vocabulary: Annotated[
        int | None, Option("pieces of the tokenizer (default: 1023, or the number in SYNTHETIC)")
    ] = None,
    tokenizer: Annotated[Path | None, Option("a SentencePiece model (default: train one on the data)")] = None,
    train_subsets: Annotated[
        Sequence[str] | None,
        Option(f"training subsets, of {', '.join(TRAIN_SUBSETS)} (default: all)", metavar="SUBSET"),
    ] = None,
    workers: int = 1,
) -> Manifest:
    """Write the prepared data set. Do nothing if it is complete, and resume an interrupted preparation.

    Args:
        raw_dir: folder with LibriSpeech's folders, as :mod:`benchmarks.rnnt.raw` describes them.
        train_subsets: LibriSpeech subsets for training. Fewer than all three are custom data.

    Raises:
        ConfigError: the vocabulary or a subset is impossible.
        DataError: the raw data are missing, damaged or of another kind; the disk is too small; ``data_dir`` holds
            data from another source or with other settings, or another process is preparing them.
    """
    source = raw.open_raw(raw_dir, train_subsets)
    pieces = raw.vocabulary_of(source) if vocabulary is None else vocabulary
    if not 1 <= pieces <= LARGEST_VOCABULARY:
        raise ConfigError(f"--vocabulary={pieces}: 1 to {LARGEST_VOCABULARY}")
    if tokenizer is not None:
        TranscriptTokenizer(tokenizer, pieces)  # checks the vocabulary before the work
    utterances = {split: source.utterances(split) for split in SPLITS}
    wanted = {
        "fingerprint": raw.fingerprint(utterance for split in SPLITS for utterance in utterances[split]),
        "settings": json.dumps(
            {"vocabulary": pieces, "tokenizer": "trained" if tokenizer is None else digest(tokenizer, "sha256")},
            sort_keys=True,
        ),
    }
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        files, counts = SpeechPipeline(utterances, data_dir, job.begin(WORK), pieces, tokenizer, workers).run()
        subsets = (*source.subsets["train"], *source.subsets["eval"])
        return job.finish(files, counts, f"LibriSpeech: {', '.join(subsets)}")


def read_flac(path: Path) -> NDArray[np.int16]:
    """Return the samples of a FLAC file with one channel, 16 bits and 16 kHz, (N,) int16.

    The first block of a FLAC file has the number of samples and their MD5 (RFC 9639, section 8.2).

    Raises:
        DataError: the file is missing, truncated, damaged, or of another kind.
    """
    try:
        with soundfile.SoundFile(path) as file:
            _check_kind(path, file)
            expected = file.frames
            samples: NDArray[np.int16] = file.read(dtype="int16")
        with open(path, "rb") as opened:
            head = opened.read(_STREAM_INFO_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {_REMEDY}") from error
    except soundfile.LibsndfileError as error:
        raise DataError(f"{path} is no FLAC file, or a damaged one ({error.error_string}); {_REMEDY}") from error
    if len(samples) != expected:
        raise DataError(f"{path} is truncated: {len(samples)} of {expected} samples; {_REMEDY}")
    if not len(samples):
        raise DataError(f"{path} holds no samples; {_REMEDY}")
    known = head[_MD5]  # zeros if the encoder did not compute it
    if any(known) and hashlib.md5(samples.astype("<i2", copy=False).data).digest() != known:
        raise DataError(f"{path} is damaged: the MD5 of its samples differs from the one in its header; {_REMEDY}")
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


class SpeechPipeline:
    """Preparation of tokenizer, audio files and columns.

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

    def run(self) -> tuple[dict[str, FileEntry], dict[str, int]]:
        """Run all unfinished stages, and return the files in the data folder and the counts for the manifest.

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
            names += self._write_split(split, columns)
            files |= self._entries(split, shards[split])
            counts |= _counts(split, columns)
        files |= describe_files(self.data_dir, names)
        return files, {**counts, "vocabulary": tokenizer.size}

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
                f"{culprit.path}: the tokenizer, trained on other transcripts, cannot encode all of "
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

    def _write_split(self, split: str, columns: Mapping[str, NDArray[Any]]) -> list[str]:
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
    """Train a tokenizer with ``vocabulary`` pieces, or copy ``model``, to ``path``; return ``pieces``, their number.

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
    """Write the joined samples of FLAC files to ``path``; return ``samples`` of each file, and ``sha256``.

    Raises:
        DataError: a file is damaged or of another kind.
    """
    sha256 = hashlib.sha256()
    samples = []
    with atomic.written(path) as partial, open(partial, "wb") as out:
        for name in flacs:
            content = read_flac(Path(name)).astype("<i2", copy=False).data
            sha256.update(content)
            out.write(content)
            samples.append(len(content))
    return {"samples": samples, "sha256": sha256.hexdigest()}


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


def _remarks(made: Manifest, **options: Any) -> Iterator[str]:
    for split in SPLITS:
        samples, seconds = made.counts[f"{split}_samples"], made.counts[f"{split}_audio_samples"] / 16_000
        yield (
            f"{split}: {seconds / 3600:.2f} h, {seconds / samples:.2f} s an utterance, the longest "
            f"{made.counts[f'{split}_longest_samples'] / 16_000:.2f} s; "
            f"{made.counts[f'{split}_tokens'] / seconds:.2f} pieces a second"
        )


COMMANDS = DataCommands(
    "rnnt",
    raw="LibriSpeech's archives, or their content",
    prepared="prepared samples and word pieces",
    real="LibriSpeech",
    generate=generate,
    prepare=prepare,
    verify=manifest.verification(FORMAT, PREPARE_COMMAND),
    remarks=_remarks,
    published=PUBLISHED,
)
