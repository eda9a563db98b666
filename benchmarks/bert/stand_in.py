"""Generate synthetic data: the documentation of the Python standard library, in the format of WikiExtractor.

Each article documents one module, class, method or function, without examples; articles are sorted by name. The text
is real English, and as in Wikipedia most articles are short, which gives sequences of many lengths. The vocabulary is
built from the same text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bert import raw
from benchmarks.bert.preparation.tokenizer import MAX_VOCABULARY, words
from benchmarks.bert.raw import Settings
from common.data import stand_in
from common.data.python_documentation import documentation
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
class Generated:
    """Numbers of articles, of characters in their text, and of pieces in the vocabulary."""

    articles: int
    characters: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.articles} articles, {self.characters / 1e6:.2f} MB of text, a vocabulary of {self.vocabulary}"


def generate(raw_dir: Path, articles: int | None, vocabulary: int, settings: Settings) -> Generated:
    """Write synthetic articles and a vocabulary to ``raw_dir``, and mark them as synthetic.

    Args:
        raw_dir: an empty or new folder.
        articles: number of articles; None for all that the standard library has.
        vocabulary: number of pieces in ``vocab.txt``.
        settings: sizes for the preparation, stored with the data.

    Raises:
        ConfigError: a number is out of range.
        DataError: ``raw_dir`` is not empty, or this Python has too little documentation.
    """
    if not SMALLEST_VOCABULARY <= vocabulary <= MAX_VOCABULARY:
        raise ConfigError(f"vocabulary={vocabulary}: {SMALLEST_VOCABULARY} to {MAX_VOCABULARY}")
    if articles is not None and articles < 2 * settings.parts:
        raise ConfigError(f"articles={articles}: at least two for each of {settings.parts} parts")
    stand_in.require_unused(raw_dir)
    found: list[tuple[str, list[str]]] = []
    for title, paragraphs in documentation():
        found.append((title, paragraphs))
        if len(found) == articles:
            break
    if len(found) < (articles or 2 * settings.parts):
        raise DataError(f"this Python's library holds {len(found)} documented things, fewer than were asked for")
    if settings.eval_articles > len(found) // 2:
        raise ConfigError(f"eval_articles={settings.eval_articles}: at most half of {len(found)} articles")
    description = {"kind": "documentation of Python", "articles": len(found), "settings": asdict(settings)}
    with stand_in.generated(raw_dir) as folder:
        stand_in.mark(folder, description)
        _write_articles(folder / raw.ARTICLES_FOLDER, found, max(settings.parts, min(_FILES, len(found) // 4)))
        pieces = make_vocabulary((text for _, paragraphs in found for text in paragraphs), vocabulary)
        (folder / raw.VOCABULARY).write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return Generated(len(found), sum(len(text) for _, paragraphs in found for text in paragraphs), len(pieces))


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
            for place in range(number, len(articles), files):
                title, paragraphs = articles[place]
                url = f"https://docs.python.org/3/library/{title}.html"
                body = "\n".join(paragraphs)
                file.write(f'<doc id="{place}" url="{url}" title="{title}">\n{title}\n\n{body}\n</doc>\n')
