"""Word error rate: edits that make the recognised words of the reference's, over all utterances together.

Edits are substitutions, insertions and deletions of words, as few as possible (Levenshtein's distance), summed over
the utterances; they are divided by the words of all references, so the rate can exceed 1.

Legend: N utterances, R words of a reference, W of a hypothesis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHUNK = 256
"""Utterances, of like length, that are compared at once."""


_NOWHERE, _NO_REFERENCE, _NO_HYPOTHESIS = -1, -2, -3
"""Numbers of a word that no reference has, and of padding."""


class WordErrors:
    """Counts the word errors of hypotheses against the same references again and again.

    Args:
        references: what is said in each utterance; words are separated by white space.

    Attributes:
        words: of all references.

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
        # Utterances of like length are compared together: there is little padding.
        lengths = np.array([len(reference) for reference in self._references])
        longest_first = np.argsort(-lengths, kind="stable")
        self._chunks = [longest_first[at : at + CHUNK].tolist() for at in range(0, len(longest_first), CHUNK)]

    def edits(self, hypotheses: Sequence[str]) -> int:
        """The summed distances of ``hypotheses``, one for each reference, in their order.

        Raises:
            ValueError: there is another number of them.
        """
        if len(hypotheses) != len(self._references):
            raise ValueError(f"{len(hypotheses)} hypotheses for {len(self._references)} references")
        numbered = [self._numbered(text) for text in hypotheses]
        return sum(
            int(_distances([self._references[i] for i in chunk], [numbered[i] for i in chunk]).sum())
            for chunk in self._chunks
        )

    def rate(self, hypotheses: Sequence[str]) -> float:
        """The word error rate of ``hypotheses``."""
        return self.edits(hypotheses) / self.words

    def _numbered(self, text: str) -> list[int]:
        """The references' number of each word; words that none of them has are wrong whatever they are."""
        return [self._numbers.get(word, _NOWHERE) for word in text.split()]


def _distances(references: Sequence[Sequence[int]], hypotheses: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """(N,) the distance of each pair; the references do not become longer from one to the next.

    A row of the usual table for one more word of each reference, all utterances side by side. A row's insertions,
    d[w] = min over v <= w of (t[v] + w - v), are a running minimum of t[v] - v.
    """
    reference_NR, lengths_N = _padded(references, _NO_REFERENCE)
    hypothesis_NW, widths_N = _padded(hypotheses, _NO_HYPOTHESIS)
    places_W1 = np.arange(hypothesis_NW.shape[1] + 1)
    distance_NW1 = np.repeat(places_W1[None], len(references), axis=0)
    for word in range(reference_NR.shape[1]):
        going_on = int(np.count_nonzero(lengths_N > word))
        before_NW1, wrong_NW = distance_NW1[:going_on], hypothesis_NW[:going_on] != reference_NR[:going_on, word, None]
        without_NW1 = before_NW1 + 1
        np.minimum(without_NW1[:, 1:], before_NW1[:, :-1] + wrong_NW, out=without_NW1[:, 1:])
        without_NW1 -= places_W1
        np.minimum.accumulate(without_NW1, axis=1, out=without_NW1)
        np.add(without_NW1, places_W1, out=distance_NW1[:going_on])
    return distance_NW1[np.arange(len(references)), widths_N]


def _padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows in one array, and how long each is."""
    lengths_N = np.array([len(row) for row in rows])
    padded = np.full((len(rows), int(lengths_N.max(initial=0))), padding)
    padded[np.arange(padded.shape[1]) < lengths_N[:, None]] = [number for row in rows for number in row]
    return padded, lengths_N
