"""Word error rate of recognised words against references, over all utterances together.

Errors are the minimum number of substitutions, insertions and deletions of words (Levenshtein distance), summed over
the utterances. They are divided by the words of all references, so the rate can exceed 1.

Legend: N utterances, R words of a reference, W words of a hypothesis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHUNK = 256
"""Utterances, of similar length, that are compared at once."""


_NOWHERE, _NO_REFERENCE, _NO_HYPOTHESIS = -1, -2, -3
"""Numbers for words that occur in no reference, and for padding."""


class WordErrors:
    """Counter of word errors against fixed references.

    Args:
        references: transcript of each utterance; words are separated by white space.

    Attributes:
        words: number of words of all references.

    Raises:
        ValueError: the references have no word.
    """

    def __init__(self, references: Sequence[str]) -> None:
        self._numbers: dict[str, int] = {}
        self._references = [
            [self._numbers.setdefault(word, len(self._numbers)) for word in text.split()] for text in references
        ]
        self.words = sum(len(reference) for reference in self._references)
        if not self.words:
            raise ValueError(f"{len(references)} references without a word: there is nothing to be wrong about")
        # Utterances of similar length are compared together, which needs little padding.
        lengths = np.array([len(reference) for reference in self._references])
        longest_first = np.argsort(-lengths, kind="stable")
        self._chunks = [longest_first[at : at + CHUNK].tolist() for at in range(0, len(longest_first), CHUNK)]

    def edits(self, hypotheses: Sequence[str]) -> int:
        """Return the sum of the distances of ``hypotheses``, which are in the order of the references.

        Raises:
            ValueError: the number of hypotheses differs from that of the references.
        """
        if len(hypotheses) != len(self._references):
            raise ValueError(f"{len(hypotheses)} hypotheses for {len(self._references)} references")
        numbered = [self._numbered(text) for text in hypotheses]
        return sum(
            int(_distances([self._references[i] for i in chunk], [numbered[i] for i in chunk]).sum())
            for chunk in self._chunks
        )

    def rate(self, hypotheses: Sequence[str]) -> float:
        """Return the word error rate of ``hypotheses``."""
        return self.edits(hypotheses) / self.words

    def _numbered(self, text: str) -> list[int]:
        """Return the number of each word; words that occur in no reference are always wrong."""
        return [self._numbers.get(word, _NOWHERE) for word in text.split()]


def _distances(references: Sequence[Sequence[int]], hypotheses: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the distance of each pair, (N,). References must be sorted by length, the longest first.

    Each step computes a row of the usual table, for one more word of each reference and all utterances at once.
    Insertions in a row, d[w] = min over v <= w of (t[v] + w - v), are a running minimum of t[v] - v, whose range
    doubles at each step.
    """
    reference_RN, lengths_N = _padded(references, _NO_REFERENCE)
    hypothesis_WN, widths_N = _padded(hypotheses, _NO_HYPOTHESIS)
    places_W1 = np.arange(len(hypothesis_WN) + 1, dtype=np.int32)[:, None]
    distance_WN = np.repeat(places_W1, len(references), axis=1)
    for word, reference_N in enumerate(reference_RN):
        going_on = int(np.count_nonzero(lengths_N > word))
        before_WN, wrong_WN = distance_WN[:, :going_on], hypothesis_WN[:, :going_on] != reference_N[:going_on]
        found_WN = before_WN + 1
        np.minimum(found_WN[1:], before_WN[:-1] + wrong_WN, out=found_WN[1:])
        found_WN -= places_W1
        reach = 1
        while reach < len(found_WN):
            np.minimum(found_WN[reach:], found_WN[:-reach], out=found_WN[reach:])
            reach *= 2
        np.add(found_WN, places_W1, out=before_WN)
    return distance_WN[widths_N, np.arange(len(references))]


def _padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the rows, padded, as columns of one array, and the length of each."""
    lengths_N = np.array([len(row) for row in rows])
    padded = np.full((len(rows), int(lengths_N.max(initial=0))), padding, dtype=np.int32)
    padded[np.arange(padded.shape[1]) < lengths_N[:, None]] = [number for row in rows for number in row]
    return np.ascontiguousarray(padded.T), lengths_N
