"""WordPiece for uncased English, as Google's BERT defines it.

Words are found by cleaning (control characters go, every kind of space separates), setting CJK characters apart,
lower-casing, taking accents off (NFD without non-spacing marks) and cutting at punctuation, where every ASCII
character that is neither letter nor digit counts; a word is then cut into the longest pieces of the vocabulary, from
the left. All of it works on what stands between two ASCII spaces, so results are kept for each such piece of text:
natural text repeats itself so much that hardly any word is cut twice.

The Rust library ``tokenizers`` differs where text has capital Greek: its lower case knows no final sigma.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.untrusted.regular_file import read_text

MAX_WORD_CHARACTERS = 200
"""Longer words are unknown."""

MAX_VOCABULARY = 32_767
"""Token ids are stored with 16 bits and a sign."""

_CACHED_WORDS = 1 << 20
_CJK = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """WordPieces by id, and the ids of the special ones, which are found by name.

    Attributes:
        pieces: every piece, in the file's order, which gives the ids.
        unknown, classification, separator, mask: ids of ``[UNK]``, ``[CLS]``, ``[SEP]``, ``[MASK]``.
    """

    pieces: tuple[str, ...]
    unknown: int
    classification: int
    separator: int
    mask: int

    def __len__(self) -> int:
        return len(self.pieces)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read ``vocab.txt``: one piece a line.

    Raises:
        DataError: the file is missing or no UTF-8, a line is empty or a repetition, a special piece is missing,
            ``[PAD]`` is not the first, or there are more pieces than 16-bit ids.
    """
    if not path.exists():
        raise DataError(f"{path} is missing; place the benchmark's vocab.txt there")
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    pieces = [line.strip() for line in lines]
    ids: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        if not piece or piece in ids:
            raise DataError(f"{path}: line {number + 1} is {'empty' if not piece else f'{piece!r} once more'}")
        ids[piece] = number
    for special in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        if special not in ids:
            raise DataError(f"{path} has no {special}: it is no vocabulary of BERT")
    if ids["[PAD]"] != 0:
        raise DataError(f"{path}: [PAD] is on line {ids['[PAD]'] + 1}; padding is stored as 0, it has to be the first")
    if len(pieces) > MAX_VOCABULARY:
        raise DataError(f"{path}: {len(pieces)} pieces where 16-bit ids allow {MAX_VOCABULARY}")
    return Vocabulary(tuple(pieces), ids["[UNK]"], ids["[CLS]"], ids["[SEP]"], ids["[MASK]"])


class Tokenizer:
    """Turns text into ids of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {piece: number for number, piece in enumerate(vocabulary.pieces)}
        self._unknown = vocabulary.unknown
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""
        cache = self._cache
        ids: list[int] = []
        for chunk in text.split(" "):
            known = cache.get(chunk)
            if known is None:
                if len(cache) >= _CACHED_WORDS:
                    cache.clear()
                known = cache[chunk] = [number for word in words(chunk) for number in self._pieces(word)]
            ids += known
        return ids

    def _pieces(self, word: str) -> list[int]:
        """Ids of one word: the longest piece first, or ``[UNK]`` when any part of it is not in the vocabulary."""
        if len(word) > MAX_WORD_CHARACTERS:
            return [self._unknown]
        found = []
        start, prefix = 0, ""
        while start < len(word):
            for end in range(len(word), start, -1):
                number = self._ids.get(prefix + word[start:end])
                if number is not None:
                    break
            else:
                return [self._unknown]
            found.append(number)
            start, prefix = end, "##"
        return found


def words(text: str) -> Iterable[str]:
    """Words and punctuation marks of ``text``, lower case and without accents."""
    if text.isascii() and text.isalnum():
        return (text.lower(),)
    found: list[str] = []
    for token in _clean(text).split():
        plain = unicodedata.normalize("NFD", token.lower())
        spaced = "".join(
            f" {character} " if _is_punctuation(character) else character
            for character in plain
            if unicodedata.category(character) != "Mn"
        )
        found += spaced.split()
    return found


def _clean(text: str) -> str:
    """``text`` without control characters, all spaces as ASCII spaces, CJK characters set apart."""
    cleaned = []
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            cleaned.append(" ")
        elif character == "\ufffd" or category in ("Cc", "Cf"):
            continue
        elif _is_cjk(ord(character)):
            cleaned.append(f" {character} ")
        else:
            cleaned.append(character)
    return "".join(cleaned)


def _is_cjk(code: int) -> bool:
    return code >= 0x3400 and any(first <= code <= last for first, last in _CJK)


def _is_punctuation(character: str) -> bool:
    if character.isascii():
        return "!" <= character <= "~" and not character.isalnum()
    return unicodedata.category(character).startswith("P")
