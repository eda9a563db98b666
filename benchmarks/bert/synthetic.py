"""Generate synthetic data: the documentation of the Python standard library, in the format of WikiExtractor.

Each article documents one module, class, method or function, without examples; articles are sorted by name. The text
is real English, and as in Wikipedia most articles are short, which gives sequences of many lengths. The vocabulary is
built from the same text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from benchmarks.bert import raw
from benchmarks.bert.preparation.wordpiece import MAX_VOCABULARY, words
from benchmarks.bert.raw import PreparationSizes
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError, DataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNUSED = 99
"""Number of unused pieces between ``[PAD]`` and ``[UNK]`` in the real vocabulary."""
REAL_LAYOUT = 1000
"""Minimum size of a vocabulary in which the special pieces get the same ids as in the real vocabulary."""
SMALLEST_VOCABULARY = 200
_FILES = 20
_WORD_SHARE = 0.75


@dataclass(frozen=True)
class SyntheticArticles(Options):
    """Options of ``generate``; see :class:`benchmarks.bert.raw.PreparationSizes` for the sizes that the data keep."""

    articles: Annotated[int | None, Option("articles (default: all of Python's library)")] = None
    vocabulary: Annotated[int, Option("pieces of the vocabulary", least=SMALLEST_VOCABULARY, most=MAX_VOCABULARY)] = (
        2048
    )
    max_sequence_length: Annotated[int, Option("tokens of the longest sequence")] = 128
    train_samples: Annotated[int | None, Option("sequences to train on (default: all)", "--train")] = None
    eval_samples: Annotated[int, Option("sequences to evaluate", "--eval")] = 512
    eval_articles: Annotated[int, Option("articles to evaluate")] = 100
    parts: Annotated[int, Option("text parts")] = 4
    shards: Annotated[int, Option("files of training data")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.articles is not None and self.articles < 2 * self.parts:
            raise ConfigError(f"--articles={self.articles}: at least two for each of {self.parts} parts")
        _ = self.settings  # raises an error for impossible sizes

    @property
    def settings(self) -> PreparationSizes:
        """Sizes for the preparation."""
        return PreparationSizes(**{field.name: getattr(self, field.name) for field in fields(PreparationSizes)})


def generate(raw_dir: Path, options: SyntheticArticles = SyntheticArticles()) -> str:
    """Write synthetic articles and a vocabulary to ``raw_dir``, an empty or new folder; return a summary.

    Raises:
        ConfigError: there are fewer articles than the options need.
        DataError: ``raw_dir`` is not empty, or this Python has too little documentation.
    """
    found: list[tuple[str, list[str]]] = []
    for title, paragraphs in synthetic.documentation():
        found.append((title, paragraphs))
        if len(found) == options.articles:
            break
    if len(found) < (options.articles or 2 * options.parts):
        raise DataError(f"this Python's library holds {len(found)} documented things, fewer than were asked for")
    if options.eval_articles > len(found) // 2:
        raise ConfigError(f"--eval-articles={options.eval_articles}: at most half of {len(found)} articles")
    description = {"kind": "documentation of Python", "articles": len(found), "settings": asdict(options.settings)}
    with synthetic.generated(raw_dir) as folder:
        synthetic.mark(folder, description)
        _write_articles(folder / raw.ARTICLES_FOLDER, found, max(options.parts, min(_FILES, len(found) // 4)))
        pieces = make_vocabulary((text for _, paragraphs in found for text in paragraphs), options.vocabulary)
        (folder / raw.VOCABULARY).write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    characters = sum(len(text) for _, paragraphs in found for text in paragraphs)
    return f"{len(found)} articles, {characters / 1e6:.2f} MB of text, a vocabulary of {len(pieces)}"


def make_vocabulary(paragraphs: Iterator[str], size: int) -> list[str]:
    """Return special pieces, ASCII characters of the text, its most frequent words, and ends of the other words.

    Unused pieces fill the vocabulary up to ``size`` if the text has too few pieces.
    """
    counts: Counter[str] = Counter()
    for text in paragraphs:
        counts.update(words(text))
    characters = sorted({character for word in counts for character in word if character.isascii()})
    head = [SPECIAL[0], *(f"[unused{number}]" for number in range(UNUSED)), *SPECIAL[1:]]
    pieces = dict.fromkeys(head if size >= REAL_LAYOUT else SPECIAL)
    pieces.update(dict.fromkeys(characters))
    pieces.update(dict.fromkeys(f"##{character}" for character in characters if character.isalnum()))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    whole = len(pieces) + int(_WORD_SHARE * (size - len(pieces)))
    for word in ranked:
        if len(pieces) >= whole:
            break
        pieces.setdefault(word)
    ends: Counter[str] = Counter()
    for word in ranked:
        if word not in pieces:
            for length in range(2, min(6, len(word))):
                ends[f"##{word[-length:]}"] += counts[word] * length
    for piece in sorted(ends, key=lambda end: (-ends[end], end)) + ranked:
        if len(pieces) >= size:
            break
        pieces.setdefault(piece)
    spare = (f"[unused{number}]" for number in range(UNUSED, UNUSED + size))
    return list(pieces) + list(itertools.islice(spare, max(0, size - len(pieces))))


def _write_articles(folder: Path, articles: list[tuple[str, list[str]]], files: int) -> None:
    (folder / "AA").mkdir(parents=True)
    for number in range(files):
        with open(folder / "AA" / f"wiki_{number:02d}", "w", encoding="utf-8", newline="\n") as file:
            for index in range(number, len(articles), files):
                title, paragraphs = articles[index]
                url = f"https://docs.python.org/3/library/{title}.html"
                body = "\n".join(paragraphs)
                file.write(f'<doc id="{index}" url="{url}" title="{title}">\n{title}\n\n{body}\n</doc>\n')
