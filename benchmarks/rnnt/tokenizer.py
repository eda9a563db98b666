"""Word pieces: SentencePiece's unigram model, with the options of the benchmark's reference.

There are no pieces for begin or end of sentence. Piece 0 stands for unknown text. The blank follows the last piece
and is not a piece.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from common.errors import DataError
from common.untrusted.regular_file import read_bytes

THREADS = 16
"""Threads of training, SentencePiece's default. Each sums a part of the counts, so the model depends on this number."""
UNKNOWN = 0


class TranscriptTokenizer:
    """A trained tokenizer.

    Args:
        path: file of the model.
        vocabulary: required number of pieces; None: any.

    Raises:
        DataError: the file is missing or damaged, or has another number of pieces.
    """

    def __init__(self, path: Path, vocabulary: int | None = None) -> None:
        if not path.exists():
            raise DataError(f"tokenizer {path} is missing")
        try:
            self._model = SentencePieceProcessor(model_proto=read_bytes(path))
        except RuntimeError as error:
            raise DataError(f"{path} is no SentencePiece model, or damaged ({error})") from error
        if vocabulary is not None and self.size != vocabulary:
            raise DataError(f"{path} has {self.size} pieces, expected {vocabulary}: it is another tokenizer")

    @property
    def size(self) -> int:
        """Number of pieces."""
        return int(self._model.vocab_size())

    def encode(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return the pieces of each text."""
        encoded: list[list[int]] = self._model.encode(list(texts), num_threads=threads)
        return encoded

    def decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of pieces."""
        return [str(self._model.decode(list(sequence))) for sequence in pieces]


def train(transcripts: Iterable[str], vocabulary: int) -> bytes:
    """Return a trained model, a pure function of the transcripts.

    Raises:
        DataError: there are too few transcripts for this vocabulary, or more letters than pieces.
    """
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(transcripts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocabulary,
            character_coverage=1.0,
            bos_id=-1,
            eos_id=-1,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or str(error)
        raise DataError(f"no tokenizer of {vocabulary} pieces can be trained on these transcripts: {reason}") from error
    return model.getvalue()
