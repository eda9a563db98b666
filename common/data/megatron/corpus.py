"""What a preparation starts from: C4's files of text and a tokenizer, or pairs of files that others made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from common.data.manifest import digest
from common.data.megatron.indexed import bin_of, idx_of
from common.data.published import Published, PublishedFile
from common.data.stand_in import MARKER, description_of
from common.errors import ConfigError, DataError

Split = Literal["train", "eval"]
TEXT_FOLDERS = (".", "en", "c4", "c4/en")
"""Where the text may lie below the raw folder; the second is its name on Hugging Face."""


@dataclass(frozen=True)
class Part:
    """One pair of files of the prepared data.

    Attributes:
        name: of the files, without their ends.
        split: what it is for.
        files: names of the files of text that it is made of, in their order.
        documents: how many it takes, the first ones; None for all.
    """

    name: str
    split: Split
    files: tuple[str, ...]
    documents: int | None = None


@dataclass(frozen=True)
class Corpus:
    """What one workload trains on.

    Attributes:
        benchmark: name of the workload.
        tokenizer: name of the tokenizer's file; its end says of what kind it is.
        vocabulary: tokens of the model.
        parts: pairs of files.
        sizes: published bytes of the pairs' files, by their names.
        checksums: published MD5s of the same.
    """

    benchmark: str
    tokenizer: str
    vocabulary: int
    parts: tuple[Part, ...]
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]

    @property
    def prepare_command(self) -> str:
        """The command that prepares it."""
        return f"mlperf-suite prepare benchmark={self.benchmark} --raw-dir RAW --data-dir DATA"

    @property
    def published(self) -> Published:
        """The benchmark's pairs, whether they are made from text or adopted."""
        names = [*self.sizes, *(name for name in self.checksums if name not in self.sizes)]
        return Published(
            files={name: PublishedFile(self.sizes.get(name), self.checksums.get(name, "")) for name in names}
        )


@dataclass(frozen=True)
class Settings:
    """What a stand-in has instead of all files.

    Attributes:
        vocabulary: tokens of its tokenizer.
        train_files, eval_files: files of each part, its first ones.
        eval_documents: documents that the evaluation takes; None for all.
    """

    vocabulary: int
    train_files: int = 1
    eval_files: int = 1
    eval_documents: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (type(value) is int and value >= 1):
                raise ConfigError(f"{name}={value}: a number of at least 1")

    def of(self, part: Part) -> Part:
        """``part`` as the stand-in has it."""
        if part.split == "train":
            return Part(part.name, part.split, part.files[: self.train_files])
        return Part(part.name, part.split, part.files[: self.eval_files], self.eval_documents)


@dataclass(frozen=True)
class RawCorpus:
    """What was found.

    Attributes:
        folder: where it lies.
        parts: what to make of it.
        vocabulary: tokens of the model.
        tokenizer: its file; None where the pairs were made by others.
        stand_in: what the generated data are; None for the benchmark's.
    """

    folder: Path
    parts: tuple[Part, ...]
    vocabulary: int
    tokenizer: Path | None
    stand_in: dict[str, Any] | None

    @property
    def files(self) -> list[Path]:
        """All files but the tokenizer."""
        if self.tokenizer is None:
            return [end(self.folder / part.name) for part in self.parts for end in (bin_of, idx_of)]
        return [path for part in self.parts for path in self.text_of(part)]

    def text_of(self, part: Part) -> list[Path]:
        """The files of text of ``part``."""
        return [_text_file(self.folder, name) for name in part.files]

    def fingerprint(self) -> str:
        """SHA-256 over names and sizes of the files, and the tokenizer: what decides the result, wherever it lies."""
        lines = [f"{path.name}\t{path.stat().st_size}\n" for path in self.files]
        lines += [f"{part.name}\t{part.documents}\n" for part in self.parts]
        lines += [digest(self.tokenizer, "sha256")] if self.tokenizer else []
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_raw(raw_dir: Path, corpus: Corpus) -> RawCorpus:
    """Find out what ``raw_dir`` holds: text and tokenizer, or pairs of files.

    Raises:
        DataError: the folder, a file or the tokenizer is missing, or ``STAND_IN`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; put the data set there or generate a stand-in")
    stand_in = description_of(raw_dir)
    vocabulary, parts = corpus.vocabulary, corpus.parts
    if stand_in is not None:
        settings = _settings(stand_in)
        vocabulary, parts = settings.vocabulary, tuple(map(settings.of, parts))
    pairs = [end(raw_dir / part.name) for part in parts for end in (bin_of, idx_of)]
    if any(path.is_file() for path in pairs):
        _require(pairs)
        return RawCorpus(raw_dir, parts, vocabulary, None, stand_in)
    first = parts[0].files[0]
    places = (raw_dir / place for place in TEXT_FOLDERS)
    folder = next((place for place in places if _text_file(place, first).is_file()), None)
    if folder is None:
        raise DataError(
            f"{raw_dir} holds neither text ({first} …) nor {pairs[0].name}; 'mlperf-suite download "
            f"benchmark={corpus.benchmark}' says where they are"
        )
    _require([_text_file(folder, name) for part in parts for name in part.files])
    tokenizers = (raw_dir / corpus.tokenizer, raw_dir / "tokenizer" / corpus.tokenizer, folder / corpus.tokenizer)
    tokenizer = next((path for path in tokenizers if path.is_file()), None)
    if tokenizer is None:
        raise DataError(f"{tokenizers[0]} is missing: text needs the tokenizer")
    return RawCorpus(folder, parts, vocabulary, tokenizer, stand_in)


def _text_file(folder: Path, name: str) -> Path:
    """The file ``name``, or what was unpacked from it, as MLCommons distributes C4."""
    unpacked = folder / name.removesuffix(".gz")
    return unpacked if unpacked.is_file() and not (folder / name).is_file() else folder / name


def _settings(stand_in: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**stand_in["settings"])
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{MARKER} of the raw data lacks or garbles its settings: {error}") from error


def _require(paths: list[Path]) -> None:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]} is missing{more}, though others of the data set are there")
