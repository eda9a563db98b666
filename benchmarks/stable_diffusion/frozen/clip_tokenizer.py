"""CLIP's tokenizer: byte-pair encoding of lower-cased text (Sennrich et al. 2016, over bytes as in GPT-2).

As in the reference, ``ftfy.fix_text`` first repairs the text: mojibake, typographic quotes and similar.

The vocabulary is built from a file of merges. Ids 0 to 255 are single bytes, 256 to 511 are bytes that end a word.
Then follows one token per merge, in the order of the file, and finally the tokens that mark start and end of a text.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import ftfy
import torch
from torch import Tensor

from common.errors import DataError
from common.untrusted.archives import read_gzip
from common.untrusted.regular_file import decoded

END_OF_WORD = "</w>"
BEGIN, END = "<start_of_text>", "<end_of_text>"  # OpenCLIP's spelling; CLIP's differs
BYTE_TOKENS = 512
MARKS = 2

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(code) for code in range(0x2000, 0x200B)
}
"""Unicode's White_Space: the meaning of ``\\s`` in the regular expression of the original vocabulary."""
MOST_BYTES = 2**26
"""Largest accepted size of the decompressed merges in bytes; OpenCLIP's file has 3 MB."""
_KEPT_WORDS = 2**16


class ClipTokenizer:
    """Function that maps captions to rows of token ids.

    Args:
        merges: the published gzip file, or one of the same layout: a line with the version, then one pair per line.
            If there are more pairs than the vocabulary needs, the first ones are used.
        vocabulary: total number of tokens.
        context: ids per row, T.

    Raises:
        DataError: the file is missing or damaged, or has fewer pairs than the vocabulary needs.
    """

    def __init__(self, merges: Path, vocabulary: int, context: int) -> None:
        pairs = read_merges(merges, vocabulary - BYTE_TOKENS - MARKS)
        characters = list(byte_characters().values())
        tokens = [*characters, *(character + END_OF_WORD for character in characters), *map("".join, pairs)]
        self.vocabulary = vocabulary
        self.context = context
        self.begin, self.end = vocabulary - MARKS, vocabulary - 1
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self._bytes = byte_characters()
        self._known: dict[str, tuple[int, ...]] = {}

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Tokenize captions.

        Returns:
            (N, T) int64: start, text, end, zeros. Long texts are truncated; they have an end, too.
        """
        rows = torch.zeros(len(captions), self.context, dtype=torch.int64)
        for row, caption in zip(rows, captions, strict=True):
            ids = [self.begin, *self.encode(caption), self.end][: self.context]
            ids[-1] = self.end
            row[: len(ids)] = torch.tensor(ids)
        return rows

    def encode(self, caption: str) -> list[int]:
        """Return all ids of a caption, without start and end."""
        return [token for word in words(self._clean(caption)) for token in self._word_ids(word)]

    def _clean(self, caption: str) -> str:
        text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
        return "".join(" " if character in _SPACES else character for character in text).lower()

    def _word_ids(self, word: str) -> tuple[int, ...]:
        if word not in self._known:
            if len(self._known) == _KEPT_WORDS:
                self._known.clear()
            self._known[word] = self._encode_word(word)
        return self._known[word]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if word in (BEGIN, END):
            return (self.begin if word == BEGIN else self.end,)
        return tuple(self._ids[part] for part in merged(byte_symbols(word, self._bytes), self._ranks))


def words(text: str) -> Iterator[str]:
    """Yield the words of a lower-cased text; merges stay within a word.

    A word is the first match of: a start or end mark, an English contraction, letters, one digit, other non-spaces.
    """
    start = 0
    while start < len(text):
        kind = _kind(text[start])
        if kind == _SPACE:
            start += 1
            continue
        fixed = next((word for word in (BEGIN, END, *_CONTRACTIONS) if text.startswith(word, start)), None)
        if fixed is not None:
            end = start + len(fixed)
        else:
            end = start + 1
            while kind != _NUMBER and end < len(text) and _kind(text[end]) == kind:
                end += 1
        yield text[start:end]
        start = end


def merged(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge pairs of ``symbols`` of a word, always the pair of lowest rank first."""
    while len(symbols) > 1:
        best = min(pairwise(symbols), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        symbols = merge_pair(symbols, best)
    return symbols


def merge_pair(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Merge every occurrence of ``pair`` in ``symbols``, from the left."""
    result: list[str] = []
    position = 0
    while position < len(symbols):
        if tuple(symbols[position : position + 2]) == pair:
            result.append("".join(pair))
            position += 2
        else:
            result.append(symbols[position])
            position += 1
    return result


def byte_symbols(word: str, characters: dict[int, str]) -> list[str]:
    """Return the symbols before merging: a character per byte, the last one with the end-of-word mark."""
    symbols = [characters[byte] for byte in word.encode("utf-8", "replace")]
    return [*symbols[:-1], symbols[-1] + END_OF_WORD]


def byte_characters() -> dict[int, str]:
    """Return a printable character for every byte, in the order of the vocabulary.

    Printable bytes of Latin-1 come first and represent themselves; the other bytes are characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def read_merges(path: Path, count: int) -> list[tuple[str, str]]:
    """Read the first ``count`` pairs of a file of merges.

    Raises:
        DataError: the file is missing or damaged, or has fewer pairs.
    """
    try:
        lines = decoded(path, read_gzip(path, MOST_BYTES)).split("\n")
    except DataError as error:
        raise DataError(f"{path} cannot be read as gzip with UTF-8 in it: {error}") from error
    found = [tuple(line.split()) for line in lines[1 : count + 1] if line.strip()]
    if len(found) < count:
        raise DataError(
            f"{path} has {len(found)} merges, but a vocabulary of {count + BYTE_TOKENS + MARKS} needs {count}"
        )
    pairs: list[tuple[str, str]] = []
    for number, pair in enumerate(found, 2):
        if len(pair) != 2:
            raise DataError(f"{path}: line {number} has {len(pair)} symbols, expected a pair")
        pairs.append((pair[0], pair[1]))
    if len({first + second for first, second in pairs}) < count:
        raise DataError(f"{path}: two merges make the same token")
    return pairs


_SPACE, _LETTER, _NUMBER, _OTHER = range(4)


@lru_cache(_KEPT_WORDS)
def _kind(character: str) -> int:
    if character in _SPACES:
        return _SPACE
    return {"L": _LETTER, "N": _NUMBER}.get(unicodedata.category(character)[0], _OTHER)
