"""Input of a preparation: C4's text files and a tokenizer, or pairs of files that were tokenized elsewhere.

All pairs are in one folder, and all text files of a part are in one folder; both can be anywhere below the raw
folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from common.data.manifest import digest
from common.data.megatron.indexed import bin_of, idx_of
from common.data.published import Published
from common.data.raw_layout import find_file, packed_hint
from common.data.synthetic import MARKER, description_of
from common.errors import ConfigError, DataError
from common.untrusted.regular_file import read_text

Split = Literal["train", "eval"]
OTHER_VARIANTS = ("en.noblocklist",)
"""Folders of C4's repository, next to ``en``, whose files have the same names."""


@dataclass(frozen=True)
class CorpusPart:
    """One pair of files of the prepared data.

    Attributes:
        name: file name without ``.bin`` and ``.idx``.
        files: names of the text files of this part, in order.
        documents: number of documents, taken from the start; None for all.
        one_file: name of a file with exactly these documents, which may replace ``files``.
    """

    name: str
    split: Split
    files: tuple[str, ...]
    documents: int | None = None
    one_file: str | None = None


@dataclass(frozen=True)
class Corpus:
    """The training and evaluation data of one workload.

    Attributes:
        tokenizer: name of the tokenizer's file; its suffix gives the tokenizer type.
        vocabulary: vocabulary size of the model.
        published: published properties of the pairs, whether made from text or adopted.
        archive: name of the published archive with the pairs; None if there is none.
    """

    benchmark: str
    tokenizer: str
    vocabulary: int
    parts: tuple[CorpusPart, ...]
    published: Published
    archive: str | None = None

    @property
    def prepare_command(self) -> str:
        """The command that prepares the corpus."""
        return f"mlperf-suite prepare benchmark={self.benchmark} --raw-dir RAW --data-dir DATA"


@dataclass(frozen=True)
class SyntheticSizes:
    """Reduced sizes of a synthetic corpus.

    Attributes:
        vocabulary: vocabulary size of its tokenizer.
        train_files, eval_files: number of text files per part, taken from the start.
        eval_documents: number of documents for evaluation; None for all.
    """

    vocabulary: int
    train_files: int = 1
    eval_files: int = 1
    eval_documents: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (type(value) is int and value >= 1):
                raise ConfigError(f"{name}={value}: a number of at least 1")

    def of(self, part: CorpusPart) -> CorpusPart:
        """Return ``part``, reduced to the synthetic corpus."""
        if part.split == "train":
            return replace(part, files=part.files[: self.train_files])
        return replace(part, files=part.files[: self.eval_files], documents=self.eval_documents)


@dataclass(frozen=True)
class RawCorpus:
    """The raw data in a folder.

    Attributes:
        files_of: name of each part to its text files, in order, or to its pair of files.
        tokenizer: the tokenizer's file; None if the raw data are pairs.
        synthetic: description of synthetic data; None for the benchmark's data.
    """

    files_of: Mapping[str, tuple[Path, ...]]
    parts: tuple[CorpusPart, ...]
    vocabulary: int
    tokenizer: Path | None
    synthetic: dict[str, Any] | None

    @property
    def files(self) -> list[Path]:
        """All files except the tokenizer."""
        return [path for part in self.parts for path in self.files_of[part.name]]

    def fingerprint(self) -> str:
        """Return a SHA-256 over file names, file sizes and tokenizer, which decide the result; folders are ignored."""
        lines = [f"{path.name}\t{path.stat().st_size}\n" for path in self.files]
        lines += [f"{part.name}\t{part.documents}\n" for part in self.parts]
        lines += [digest(self.tokenizer, "sha256")] if self.tokenizer else []
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_raw(raw_dir: Path, corpus: Corpus) -> RawCorpus:
    """Return the contents of ``raw_dir``: text and tokenizer, or pairs of files.

    Raises:
        DataError: the folder, a file or the tokenizer is missing, or ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; put the data set there or generate synthetic data")
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
    synthetic = description_of(raw_dir, *filter(None, (pair, tokenizer, *texts)))
    vocabulary, parts = corpus.vocabulary, corpus.parts
    if synthetic is not None:
        settings = _settings(synthetic)
        vocabulary, parts = settings.vocabulary, tuple(map(settings.of, parts))
    if pair is not None:
        files_of = {part.name: _pair(pair.with_name(part.name)) for part in parts}
    else:
        files_of = {part.name: _texts(raw_dir, part, found) for part, found in zip(parts, texts, strict=True)}
    _require([path for paths in files_of.values() for path in paths])
    if pair is None and tokenizer is None:
        raise DataError(f"{raw_dir / corpus.tokenizer} is missing: text needs the tokenizer")
    return RawCorpus(files_of, parts, vocabulary, tokenizer, synthetic)


def _pair(prefix: Path) -> tuple[Path, ...]:
    return bin_of(prefix), idx_of(prefix)


def _first_text(raw_dir: Path, part: CorpusPart) -> Path | None:
    """Return the first text file of ``part``, packed or unpacked, or the file that has all its documents."""
    first = find_file(raw_dir, part.files[0], part.files[0].removesuffix(".gz"), others=OTHER_VARIANTS)
    if first is None and part.one_file is not None:
        first = find_file(raw_dir, part.one_file, part.one_file.removesuffix(".gz"))
    return first


def _texts(raw_dir: Path, part: CorpusPart, first: Path | None) -> tuple[Path, ...]:
    """Return the text files of ``part`` next to its ``first`` one, which is None if ``raw_dir`` lacks it."""
    if first is None:
        return (raw_dir / part.files[0],)
    if part.one_file is not None and first.name in (part.one_file, part.one_file.removesuffix(".gz")):
        return (first,)
    return tuple(_text_file(first.parent, name) for name in part.files)


def _text_file(folder: Path, name: str) -> Path:
    """Return the file ``name``, or else the unpacked file, because MLCommons distributes C4 unpacked."""
    unpacked = folder / name.removesuffix(".gz")
    return unpacked if unpacked.is_file() and not (folder / name).is_file() else folder / name


def _settings(synthetic: Mapping[str, Any]) -> SyntheticSizes:
    try:
        return SyntheticSizes(**synthetic["settings"])
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{MARKER} of the raw data has missing or invalid settings: {error}") from error


def _require(paths: list[Path]) -> None:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]} is missing{more}, though others of the data set are there")


class TextTokenizer(Protocol):
    """Converts texts to tokens, without special tokens at the start or end."""

    @property
    def size(self) -> int:
        """Vocabulary size, including added tokens."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""
        ...


class HuggingFaceTokenizer:
    """A :class:`TextTokenizer` from a ``tokenizer.json`` file.

    Raises:
        DataError: the file is not a valid ``tokenizer.json``.
    """

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # several processes tokenize in parallel already
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(read_text(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{path} is no tokenizer.json: {error}") from error

    @property
    def size(self) -> int:
        """Vocabulary size, including added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [found.ids for found in encoded]


class SentencePieceTokenizer:
    """A tokenizer from a SentencePiece model file.

    Raises:
        DataError: the file is not a valid model.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._tokenizer = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} is no SentencePiece model: {error}") from error

    @property
    def size(self) -> int:
        """Vocabulary size."""
        return int(self._tokenizer.vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        tokens: list[list[int]] = self._tokenizer.encode(list(texts), num_threads=1)
        return tokens


def open_tokenizer(path: Path) -> TextTokenizer:
    """Return the tokenizer in ``path``; its suffix (``.json`` or ``.model``) selects the type.

    Raises:
        DataError: the suffix is unknown, or the file is damaged.
    """
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise DataError(f"{path} is neither a tokenizer.json nor a SentencePiece model")
