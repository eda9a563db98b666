"""Synthetic languages with known entropy: random walks over classes of synthetic words.

Each class has a favourite successor class with high probability; all other classes are equally likely. The choice of
the word within a class does not depend on the previous word. Two languages with the same words but different favourites
differ by a function with one dimension per class, which low-rank adapters can learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

FAVOURITE = 0.85
"""Probability of the favourite successor."""
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = 2


@dataclass(frozen=True)
class Language:
    """Language with C classes of M words each.

    Attributes:
        words: all C * M words, sorted by class.
        successors: favourite successor of each class: a permutation, so that all classes are equally frequent.
    """

    words: tuple[str, ...]
    successors: NDArray[np.int64]

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return len(self.successors)

    @property
    def entropy(self) -> float:
        """Entropy rate in nats per word: the lowest possible loss of a model."""
        others = (1 - FAVOURITE) / (self.classes - 1)
        of_class = -FAVOURITE * np.log(FAVOURITE) - (1 - FAVOURITE) * np.log(others)
        word_M = self._frequencies
        return float(of_class - (word_M * np.log(word_M)).sum())

    def text(self, words: int, generator: np.random.Generator) -> str:
        """Return a random walk of ``words`` words, which starts in a random class."""
        strays = generator.random(words) >= FAVOURITE
        steps = generator.integers(1, self.classes, words)
        of_class = generator.choice(len(self._frequencies), words, p=self._frequencies)
        current, made = int(generator.integers(self.classes)), []
        for stray, step, word in zip(strays.tolist(), steps.tolist(), of_class.tolist(), strict=True):
            current = int(self.successors[current])
            if stray:  # not the favourite, but one of the other classes
                current = (current + step) % self.classes
            made.append(self.words[current * len(self._frequencies) + word])
        return " ".join(made)

    @property
    def _frequencies(self) -> NDArray[np.float64]:
        """Probabilities of the words in a class: that of the n-th word is proportional to 1 / n (Zipf's law)."""
        weight_M = 1.0 / np.arange(1, len(self.words) // self.classes + 1)
        return weight_M / weight_M.sum()


def languages(classes: int, words: int, generator: np.random.Generator) -> tuple[Language, Language]:
    """Return two languages with the same ``words`` words, in which every class has different favourites.

    Raises:
        ConfigError: there are fewer than 3 classes, they do not divide ``words``, or ``words`` is too large.
    """
    if classes < 3 or words % classes:
        raise ConfigError(f"--words={words} in --classes={classes}: at least 3 classes, of equally many words")
    vocabulary = _words(words, generator)
    order = generator.permutation(classes)
    first_C, second_C = np.empty(classes, np.int64), np.empty(classes, np.int64)
    first_C[order] = np.roll(order, -1)
    second_C[order] = np.roll(order, -2)
    return Language(vocabulary, first_C), Language(vocabulary, second_C)


def _words(count: int, generator: np.random.Generator) -> tuple[str, ...]:
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    if count > len(syllables) ** SYLLABLES // 2:
        raise ConfigError(f"--words={count}: at most {len(syllables) ** SYLLABLES // 2} can be formed")
    numbers = generator.choice(len(syllables) ** SYLLABLES, count, replace=False)
    return tuple(_word(int(number), syllables) for number in numbers)


def _word(number: int, syllables: Sequence[str]) -> str:
    made = ""
    for _ in range(SYLLABLES):
        number, syllable = divmod(number, len(syllables))
        made += syllables[syllable]
    return made
