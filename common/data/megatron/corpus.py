"""What a preparation starts from: C4's files of text and a tokenizer, or pairs of files that others made of them.

All pairs lie in one folder, and the files of text of each part do; the folders may be any below the raw folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.data.manifest import digest
from common.data.megatron.indexed import bin_of, idx_of
from common.data.raw_layout import find_file, packed_hint
from common.data.stand_in import MARKER, description_of
from common.errors import ConfigError, DataError

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Part:
    """One pair of files of the prepared data.

    Attributes:
        name: of the files, without their ends.
        split: what it is for.
        files: names of the files of text that it is made of, in their order.
        documents: how many it takes, the first ones; None for all.
        one_file: name of a file with just these documents, which may be there instead of ``files``.
    """

    name: str
    split: Split
    files: tuple[str, ...]
    documents: int | None = None
    one_file: str | None = None


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
        archive: name of the published archive of the pairs, where there is one.
    """

    benchmark: str
    tokenizer: str
    vocabulary: int
    parts: tuple[Part, ...]
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]
    archive: str | None = None

    @property
    def prepare_command(self) -> str:
        """The command that prepares it."""
        return f"mlperf-suite prepare benchmark={self.benchmark} --raw-dir RAW --data-dir DATA"


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
            return replace(part, files=part.files[: self.train_files])
        return replace(part, files=part.files[: self.eval_files], documents=self.eval_documents)


@dataclass(frozen=True)
class RawCorpus:
    """What was found.

    Attributes:
        files_of: name of each part to its files of text, in their order, or its pair of files.
        parts: what to make of it.
        vocabulary: tokens of the model.
        tokenizer: its file; None where the pairs were made by others.
        stand_in: what the generated data are; None for the benchmark's.
    """

    files_of: Mapping[str, tuple[Path, ...]]
    parts: tuple[Part, ...]
    vocabulary: int
    tokenizer: Path | None
    stand_in: dict[str, Any] | None

    @property
    def files(self) -> list[Path]:
        """All files but the tokenizer."""
        return [path for part in self.parts for path in self.files_of[part.name]]

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
    first, rest = corpus.parts[0], corpus.parts[1:]
    pair = find_file(raw_dir, *(path.name for part in corpus.parts for path in _pair(Path(part.name))))
    text = None if pair is not None else _first_text(raw_dir, first)
    if pair is None and text is None:
        packed = packed_hint(raw_dir, corpus.archive) if corpus.archive else ""
        raise DataError(
            f"{raw_dir} holds neither text ({first.files[0]} …) nor {bin_of(Path(first.name))}{packed}; "
            f"'mlperf-suite download benchmark={corpus.benchmark}' says where they are"
        )
    texts, tokenizer = [text], None
    if pair is None:
        texts += [_first_text(raw_dir, part) for part in rest]
        tokenizer = find_file(raw_dir, corpus.tokenizer)
    stand_in = description_of(raw_dir, *filter(None, (pair, tokenizer, *texts)))
    vocabulary, parts = corpus.vocabulary, corpus.parts
    if stand_in is not None:
        settings = _settings(stand_in)
        vocabulary, parts = settings.vocabulary, tuple(map(settings.of, parts))
    if pair is not None:
        files_of = {part.name: _pair(pair.with_name(part.name)) for part in parts}
    else:
        files_of = {part.name: _texts(raw_dir, part, found) for part, found in zip(parts, texts, strict=True)}
    _require([path for paths in files_of.values() for path in paths])
    if pair is None and tokenizer is None:
        raise DataError(f"{raw_dir / corpus.tokenizer} is missing: text needs the tokenizer")
    return RawCorpus(files_of, parts, vocabulary, tokenizer, stand_in)


def _pair(prefix: Path) -> tuple[Path, ...]:
    return bin_of(prefix), idx_of(prefix)


def _first_text(raw_dir: Path, part: Part) -> Path | None:
    """The first file of text of ``part``, as it is published or unpacked, or the one that holds all documents."""
    first = find_file(raw_dir, part.files[0], part.files[0].removesuffix(".gz"))
    if first is None and part.one_file is not None:
        first = find_file(raw_dir, part.one_file, part.one_file.removesuffix(".gz"))
    return first


def _texts(raw_dir: Path, part: Part, first: Path | None) -> tuple[Path, ...]:
    """The files of text of ``part`` beside its ``first`` one, which ``raw_dir`` lacks where it is None."""
    if first is None:
        return (raw_dir / part.files[0],)
    if part.one_file is not None and first.name in (part.one_file, part.one_file.removesuffix(".gz")):
        return (first,)
    return tuple(_text_file(first.parent, name) for name in part.files)


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
