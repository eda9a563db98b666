"""WordPiece tokenizer for uncased English, as in the original BERT from Google.

1. Remove control characters and replace every kind of whitespace by a space.
2. Separate CJK characters, convert to lower case, and remove accents (NFD without non-spacing marks).
3. Split at spaces and punctuation; ASCII characters that are not letters or digits count as punctuation.
4. Split each word, from the left, into the longest pieces that are in the vocabulary.

The text between two ASCII spaces can be processed on its own, so a cache stores the result for each such chunk. The
Rust library ``tokenizers`` differs for Greek capitals, because its lower case has no final sigma.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.untrusted.regular_file import read_text

MAX_WORD_CHARACTERS = 200
"""Maximum length of a word; longer words become ``[UNK]``."""

MAX_VOCABULARY = 32_767
"""Maximum number of pieces, because token ids are stored as signed 16-bit integers."""

_CACHED_WORDS = 1 << 20
_CJK = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """WordPieces, and the ids of the special pieces.

    Attributes:
        pieces: all pieces in the order of the file; the index is the id.
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
    """Read ``vocab.txt``, which has one piece per line.

    Raises:
        DataError: the file is missing or not UTF-8, a line is empty or a duplicate, a special piece is missing,
            ``[PAD]`` is not the first piece, or there are more than ``MAX_VOCABULARY`` pieces.
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
            raise DataError(f"{path}: line {number + 1} {f'repeats {piece!r}' if piece else 'is empty'}")
        ids[piece] = number
    for special in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        if special not in ids:
            raise DataError(f"{path} has no {special}: it is no vocabulary of BERT")
    if ids["[PAD]"] != 0:
        raise DataError(f"{path}: [PAD] is on line {ids['[PAD]'] + 1}; padding is stored as 0, it has to be the first")
    if len(pieces) > MAX_VOCABULARY:
        raise DataError(f"{path}: {len(pieces)} pieces where 16-bit ids allow {MAX_VOCABULARY}")
    return Vocabulary(tuple(pieces), ids["[UNK]"], ids["[CLS]"], ids["[SEP]"], ids["[MASK]"])


class WordPieceTokenizer:
    """WordPiece tokenizer with a given vocabulary, and a cache of tokenized chunks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {piece: number for number, piece in enumerate(vocabulary.pieces)}
        self._unknown = vocabulary.unknown
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""
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
        """Return the ids of one word by greedy longest match, or ``[UNK]`` if a part of it is not in the vocabulary."""
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
    """Return the words and punctuation marks of ``text``, in lower case and without accents."""
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
    """Return ``text`` without control characters, with ASCII spaces only, and with spaces around CJK characters."""
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
