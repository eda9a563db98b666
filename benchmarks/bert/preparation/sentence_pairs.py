"""Create sequences from text: pairs of segments for next-sentence prediction, with masked tokens.

The algorithm is that of the original BERT (Devlin et al., arXiv:1810.04805, section 3.1 and appendix A.1). The
sequences depend on the seed *and on the order of all calls* of ``random.Random``, with one generator per text file.
Therefore nothing here may be vectorised or reordered; otherwise the evaluation set, above all, would change.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bert.preparation.wordpiece import Vocabulary, WordPieceTokenizer
from benchmarks.bert.sequences import Sequences
from common.data.ragged import starts_of
from common.errors import DataError
from common.untrusted.regular_file import line_not_utf8, open_file

Sentence = list[int]
Document = list[Sentence]

SPECIAL_TOKENS = 3
"""Special tokens per sequence: ``[CLS]`` and two ``[SEP]``."""


@dataclass(frozen=True)
class SampleSettings:
    """Options that determine the sequences, together with text and vocabulary; defaults are those of the benchmark.

    Attributes:
        max_sequence_length: maximum number of tokens in a sequence.
        max_masked: maximum number of masked tokens in a sequence.
        masked_share: fraction of the tokens that is masked.
        short_share: fraction of the passes over documents that aim at a random shorter length.
        copies: number of passes over every document.
        seed: seed of the generator of each text file.
    """

    max_sequence_length: int = 512
    max_masked: int = 76
    masked_share: float = 0.15
    short_share: float = 0.1
    copies: int = 10
    seed: int = 12345


def read_documents(path: Path, tokenizer: WordPieceTokenizer) -> list[Document]:
    """Read a text file with one sentence per line and empty lines between documents; skip empty documents.

    Raises:
        DataError: the file is missing or not UTF-8.
    """
    documents: list[Document] = [[]]
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for line in file:
                text = line.strip()
                if not text:
                    documents.append([])
                elif sentence := tokenizer.encode(text):
                    documents[-1].append(sentence)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except UnicodeDecodeError as error:
        with open_file(path) as whole:
            number = line_not_utf8(whole)
            raise DataError(f"{path}: not UTF-8 in line {number}; fetch or extract it again") from error
    return [document for document in documents if document]


def create_samples(documents: list[Document], vocabulary: Vocabulary, settings: SampleSettings) -> Sequences:
    """Return all sequences of the documents of one text file, shuffled.

    Args:
        documents: documents of the file; the list is shuffled in place.
        vocabulary: source of the special tokens and the random words.
    """
    source = random.Random(settings.seed)
    shuffle(documents, source)
    made = _SequenceBuffer(vocabulary, settings, source)
    for _ in range(settings.copies):
        for number in range(len(documents)):
            _visit(documents, number, settings, source, made)
    order = list(range(len(made.lengths)))
    shuffle(order, source)
    return made.sequences().take(np.array(order, dtype=np.int64))


def shuffle(items: list[Any], source: random.Random) -> None:
    """Do the same as ``source.shuffle(items)``, with the same random numbers, in less than half the time."""
    bits = source.getrandbits
    for last in range(len(items) - 1, 0, -1):
        width = (last + 1).bit_length()
        pick = bits(width)
        while pick > last:
            pick = bits(width)
        items[last], items[pick] = items[pick], items[last]


def _visit(
    documents: list[Document], number: int, settings: SampleSettings, source: random.Random, made: _SequenceBuffer
) -> None:
    """Pass once over document ``number``, split it into pairs of segments, and add a sequence for each to ``made``."""
    document = documents[number]
    longest = settings.max_sequence_length - SPECIAL_TOKENS
    target = longest
    if source.random() < settings.short_share:
        target = source.randint(2, longest)
    chunk: list[Sentence] = []
    tokens = 0
    at = 0
    while at < len(document):
        chunk.append(document[at])
        tokens += len(document[at])
        at += 1
        if at < len(document) and tokens < target:
            continue
        split = source.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
        first = [token for sentence in chunk[:split] for token in sentence]
        unrelated = len(chunk) == 1 or source.random() < 0.5
        if unrelated:
            second = _random_segment(documents, number, target - len(first), source)
            at -= len(chunk) - split
        else:
            second = [token for sentence in chunk[split:] for token in sentence]
        made.add(*truncate(first, second, longest, source.random), unrelated)
        chunk, tokens = [], 0


def _random_segment(documents: list[Document], number: int, wanted: int, source: random.Random) -> list[int]:
    """Return at least ``wanted`` tokens, or all until the end, from a random position in another random document.

    If ten draws all give document ``number``, the tokens are from that document.
    """
    other = number
    for _ in range(10):
        other = source.randint(0, len(documents) - 1)
        if other != number:
            break
    document = documents[other]
    segment: list[int] = []
    for sentence in document[source.randint(0, len(document) - 1) :]:
        segment += sentence
        if len(segment) >= wanted:
            break
    return segment


def truncate(
    first: list[int], second: list[int], longest: int, draw: Callable[[], float]
) -> tuple[list[int], list[int]]:
    """Remove tokens from the longer segment (the second if equal) until both together have ``longest`` tokens.

    Each step removes one token, at the front if ``draw()`` is below 0.5, else at the end.
    """
    a_start, a_stop, b_start, b_stop = 0, len(first), 0, len(second)
    for _ in range(len(first) + len(second) - longest):
        front = draw() < 0.5
        if a_stop - a_start > b_stop - b_start:
            a_start, a_stop = (a_start + 1, a_stop) if front else (a_start, a_stop - 1)
        else:
            b_start, b_stop = (b_start + 1, b_stop) if front else (b_start, b_stop - 1)
    return first[a_start:a_stop], second[b_start:b_stop]


class _SequenceBuffer:
    """Buffer of the sequences created so far, as flat columns."""

    def __init__(self, vocabulary: Vocabulary, settings: SampleSettings, source: random.Random) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self._source = source
        self.lengths = array("i")
        self._first_lengths = array("i")
        self._input_ids = array("h")
        self._masked_lengths = array("i")
        self._positions = array("h")
        self._labels = array("h")
        self._next_sentence = array("b")

    def add(self, first: list[int], second: list[int], unrelated: bool) -> None:
        """Join the two segments, mask tokens, and append the sequence.

        Args:
            unrelated: the label of next-sentence prediction: whether ``second`` does not follow ``first``.
        """
        words = self._vocabulary
        tokens = [words.classification, *first, words.separator, *second, words.separator]
        candidates = list(range(1, len(first) + 1)) + list(range(len(first) + 2, len(tokens) - 1))
        shuffle(candidates, self._source)
        settings = self._settings
        masked = min(settings.max_masked, max(1, round(len(tokens) * settings.masked_share)))
        positions = candidates[:masked]
        labels = {position: tokens[position] for position in positions}
        draw, pieces = self._source.random, len(words)
        for position in positions:
            if draw() < 0.8:
                tokens[position] = words.mask
            elif draw() >= 0.5:
                tokens[position] = self._source.randint(0, pieces - 1)
        positions.sort()
        self.lengths.append(len(tokens))
        self._first_lengths.append(len(first) + 2)
        self._input_ids.fromlist(tokens)
        self._masked_lengths.append(len(positions))
        self._positions.fromlist(positions)
        self._labels.fromlist([labels[position] for position in positions])
        self._next_sentence.append(unrelated)

    def sequences(self) -> Sequences:
        lengths = np.frombuffer(self.lengths, np.int32) if self.lengths else np.zeros(0, np.int32)
        first_lengths = np.array(self._first_lengths, np.int32)
        starts = starts_of(lengths)
        steps = np.zeros(len(self._input_ids), np.int8)
        steps[starts + first_lengths] = 1
        steps[starts[1:]] = -1
        return Sequences(
            lengths,
            np.array(self._input_ids, np.int16),
            np.cumsum(steps, dtype=np.int8),
            np.array(self._masked_lengths, np.int32),
            np.array(self._positions, np.int16),
            np.array(self._labels, np.int16),
            np.array(self._next_sentence, np.int8),
        )
