"""Raw data of BERT: the text that MLCommons distributes, or articles that WikiExtractor wrote.

``results4/part-00000-of-00500`` … and ``results4/eval.txt`` have one sentence per line and an empty line between
articles. ``text/AA/wiki_00`` … have articles between ``<doc …>`` and ``</doc>``. These folders and ``vocab.txt`` may
also be in subfolders, where the downloader and the archive of MLCommons put them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bert.preparation.sentence_pairs import SampleSettings
from common.data.raw_layout import find_file, packed_hint, require_parts
from common.data.synthetic import MARKER, description_of
from common.errors import ConfigError, DataError
from common.formats.raw_files import listed
from common.untrusted.regular_file import read_bytes

VOCABULARY = "vocab.txt"
PARTS_FOLDER = "results4"
ARTICLES_FOLDER = "text"
EVALUATION = "eval.txt"
ARCHIVES = ("results_text.tar.gz", "results_text.zip")
"""Archives of the text from MLCommons; one of them is sufficient."""
EVALUATION_MD5 = "2a220f790517261547b1b45ed3ada07a"
VOCABULARY_MD5 = "64800d5d8528ce344256daf115d4965e"
_PART = f"part-{'[0-9]' * 5}-of-{'[0-9]' * 5}"


@dataclass(frozen=True)
class PreparationSizes:
    """Sizes of a preparation; the defaults are those of the benchmark.

    Attributes:
        max_sequence_length: maximum tokens in a sequence, and in a row of packed sequences.
        shards: number of training files.
        parts: number of text parts, each with a separate random generator (extracted articles only).
        eval_articles: number of held-out articles (extracted articles only).
        eval_samples: number of evaluation sequences.
        train_samples: number of training sequences, from the start; None uses all sequences of the text.
    """

    max_sequence_length: int = 512
    shards: int = 4320
    parts: int = 500
    eval_articles: int = 10_000
    eval_samples: int = 10_000
    train_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("shards", "parts", "eval_articles", "eval_samples", "train_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: at least 1")
        if not 16 <= self.max_sequence_length <= 512:
            raise ConfigError(f"max_sequence_length={self.max_sequence_length}: 16 to 512")

    @property
    def samples(self) -> SampleSettings:
        """Options for creating sequences; the masked share gives ``max_masked`` for lengths other than 512."""
        length = self.max_sequence_length
        return SampleSettings(length, 76 if length == 512 else int(0.15 * length + 1))


@dataclass(frozen=True)
class RawText:
    """Input files of a preparation.

    Attributes:
        parts: text parts; empty if there are ``articles``.
        evaluation: evaluation text; None if there are ``articles``.
        articles: files of WikiExtractor, sorted.
        vocabulary: path of ``vocab.txt``.
        synthetic: description of synthetic data; None for Wikipedia.
    """

    parts: list[Path]
    evaluation: Path | None
    articles: list[Path]
    vocabulary: Path
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return the SHA-256 over names and sizes of the text files and the content of the vocabulary."""
        digest = hashlib.sha256(read_bytes(self.vocabulary))
        evaluation = [] if self.evaluation is None else [self.evaluation]
        for path in (*self.parts, *self.articles, *evaluation):
            digest.update(f"\n{path.parent.name}/{path.name}\t{path.stat().st_size}".encode())
        return digest.hexdigest()


def open_raw(raw_dir: Path) -> RawText:
    """Find text and vocabulary below ``raw_dir``; text parts take precedence over articles.

    Raises:
        DataError: the folder, the vocabulary, the text or a part of it is missing, or ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(
            f"raw folder {raw_dir} does not exist; put the distributed text there or generate synthetic data"
        )
    vocabulary = find_file(raw_dir, VOCABULARY)
    if vocabulary is None:
        raise DataError(
            f"{raw_dir / VOCABULARY} is missing; 'mlperf-suite download benchmark=bert' says where it comes from"
        )
    part = find_file(raw_dir, f"{PARTS_FOLDER}/{_PART}")
    if part is not None:
        parts = sorted(part.parent.glob(_PART))
        require_parts(parts)
        evaluation = part.parent / EVALUATION
        if not evaluation.is_file():
            raise DataError(f"{evaluation} is missing: there is nothing to evaluate")
        return RawText(parts, evaluation, [], vocabulary, description_of(raw_dir, part, vocabulary))
    article = find_file(raw_dir, f"{ARTICLES_FOLDER}/*/wiki_*[0-9]")
    if article is None:
        raise DataError(
            f"{raw_dir} holds neither {PARTS_FOLDER}/part-00000-of-00500 … nor {ARTICLES_FOLDER}/AA/wiki_00 …"
            f"{packed_hint(raw_dir, *ARCHIVES)}"
        )
    articles = listed(article.parent.parent, "*/wiki_*[0-9]")
    return RawText([], None, articles, vocabulary, description_of(raw_dir, article, vocabulary))


def settings_of(source: RawText) -> PreparationSizes:
    """Return the sizes from ``SYNTHETIC``, or those of the benchmark.

    Raises:
        DataError: the settings in ``SYNTHETIC`` are missing or invalid.
    """
    if source.synthetic is None:
        return PreparationSizes()
    try:
        return PreparationSizes(**source.synthetic["settings"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{MARKER} of the raw data has missing or invalid settings: {error}") from error
