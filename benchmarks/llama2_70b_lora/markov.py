"""Made-up languages whose entropy is known: random walks over classes of made-up words.

A class is followed by its favourite with a high probability and by the others with equal ones; which word of a class
comes does not depend on the word before. Two languages with the same words but other favourites differ in a function of
few dimensions, as many as there are classes, which adapters of a low rank can learn.
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
    """C classes of M words each.

    Attributes:
        words: of class 0, of class 1, ...; C * M of them.
        successors: the favourite of each class: a permutation, so that all classes are equally frequent.
    """

    words: tuple[str, ...]
    successors: NDArray[np.int64]

    @property
    def classes(self) -> int:
        """C."""
        return len(self.successors)

    @property
    def entropy(self) -> float:
        """Nats per word of an endless text, when the words before are known: no model's loss is lower."""
        others = (1 - FAVOURITE) / (self.classes - 1)
        of_class = -FAVOURITE * np.log(FAVOURITE) - (1 - FAVOURITE) * np.log(others)
        word_M = self._frequencies
        return float(of_class - (word_M * np.log(word_M)).sum())

    def text(self, words: int, generator: np.random.Generator) -> str:
        """A random walk of so many words, from a random class on."""
        strays = generator.random(words) >= FAVOURITE
        steps = generator.integers(1, self.classes, words)
        of_class = generator.choice(len(self._frequencies), words, p=self._frequencies)
        current, made = int(generator.integers(self.classes)), []
        for stray, step, word in zip(strays.tolist(), steps.tolist(), of_class.tolist(), strict=True):
            current = int(self.successors[current])
            if stray:  # one of the others
                current = (current + step) % self.classes
            made.append(self.words[current * len(self._frequencies) + word])
        return " ".join(made)

    @property
    def _frequencies(self) -> NDArray[np.float64]:
        """Probabilities of the words of a class: the n-th is as frequent as 1 / n (Zipf's law)."""
        weight_M = 1.0 / np.arange(1, len(self.words) // self.classes + 1)
        return weight_M / weight_M.sum()


def languages(classes: int, words: int, generator: np.random.Generator) -> tuple[Language, Language]:
    """Two languages of the same ``words`` words in which every class has different favourites.

    Raises:
        ConfigError: the classes are too few, do not divide the words, or there are not so many words.
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
        raise ConfigError(f"--words={count}: at most {len(syllables) ** SYLLABLES // 2} can be made up")
    numbers = generator.choice(len(syllables) ** SYLLABLES, count, replace=False)
    return tuple(_word(int(number), syllables) for number in numbers)


def _word(number: int, syllables: Sequence[str]) -> str:
    made = ""
    for _ in range(SYLLABLES):
        number, syllable = divmod(number, len(syllables))
        made += syllables[syllable]
    return made
