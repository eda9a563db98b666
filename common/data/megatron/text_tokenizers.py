"""Tokenizers for text: Hugging Face's ``tokenizer.json`` and SentencePiece models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from common.errors import DataError
from common.untrusted.regular_file import read_text


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
