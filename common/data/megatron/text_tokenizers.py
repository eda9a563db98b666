"""Tokenizers of texts: Hugging Face's ``tokenizer.json``, and SentencePiece's models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from common.errors import DataError
from common.untrusted.regular_file import read_text


class TextTokenizer(Protocol):
    """Texts to tokens, without any token before or behind a text."""

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, added ones too."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        ...


class HuggingFaceTokenizer:
    """``tokenizer.json``.

    Raises:
        DataError: the file cannot be read as one.
    """

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the work
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(read_text(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{path} is no tokenizer.json: {error}") from error

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, added ones too."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [found.ids for found in encoded]


class SentencePieceTokenizer:
    """A model of SentencePiece.

    Raises:
        DataError: the file cannot be read as one.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._tokenizer = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} is no SentencePiece model: {error}") from error

    @property
    def size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self._tokenizer.vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        tokens: list[list[int]] = self._tokenizer.encode(list(texts), num_threads=1)
        return tokens


def open_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer in ``path``, by the end of its name: ``.json`` or ``.model``.

    Raises:
        DataError: it is of neither kind, or damaged.
    """
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise DataError(f"{path} is neither a tokenizer.json nor a SentencePiece model")
