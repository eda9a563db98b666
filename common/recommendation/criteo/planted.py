"""A made-up world in which clicks follow a known logistic model of dense and categorical features.

Categories of a feature are Zipf-distributed, and each has an effect of its own. The best possible classifier knows the
probability of every click; its area under the ROC curve, the Bayes AUC, follows from the probabilities alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.recommendation.criteo.sample_rows import DENSE

ZIPF = 1.05
"""Exponent of the categories' frequencies."""
MISSING = -1
"""In place of a category."""
EFFECTS = 64
"""Different effects of a feature; category c has the one at c % 64."""
MISSING_COUNTS, MISSING_CATEGORIES, NEGATIVE_COUNTS = 0.1, 0.05, 0.03
"""Shares of the fields."""
_NO_COUNT = np.iinfo(np.int32).min
_PROBE = 50_000


@dataclass(frozen=True)
class Drawn:
    """Samples of the world, N of them.

    Attributes:
        counts: int32, (N, 13); :attr:`no_count` where it is missing.
        categories: int64, (N, features), by rank; :data:`MISSING` where it is missing.
        click: probability, (N,).
        labels: (N,), 0 or 1.
    """

    counts: NDArray[np.int32]
    categories: NDArray[np.int64]
    click: NDArray[np.float64]
    labels: NDArray[np.int64]

    no_count = _NO_COUNT


@dataclass(frozen=True)
class World:
    """The model.

    Attributes:
        table_rows: categories of each feature, at least 2; one of them is that the category is missing.
        bayes_auc: that is aimed at.
        click_rate: mean probability of a click, likewise.
        seed: decides everything else.
    """

    table_rows: tuple[int, ...]
    bayes_auc: float
    click_rate: float
    seed: int

    def draw(self, samples: int, number: int) -> Drawn:
        """Draw ``samples``, others for each ``number``."""
        random = np.random.default_rng([self.seed, 1, number])
        scale, offset = self._scale_and_offset
        counts, categories = self._features(random, samples)
        click = _sigmoid(scale * self._effect(counts, categories) + offset)
        return Drawn(counts, categories, click, (random.random(samples) < click).astype(np.int64))

    def raw_categories(self, feature: int) -> NDArray[np.uint32]:
        """The raw number of each category of a feature but the missing one: different, of 32 bits, and not 0."""
        rows = self.table_rows[feature] - 1
        random = np.random.default_rng([self.seed, 2, feature])
        drawn = np.unique(random.integers(1, 2**32, 2 * rows + 16, dtype=np.uint32))
        while len(drawn) < rows:
            more = random.integers(1, 2**32, rows, dtype=np.uint32)
            drawn = np.unique(np.concatenate([drawn, more]))
        return random.permutation(drawn)[:rows]

    @functools.cached_property
    def _weights(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of the dense features, (13,), and of categories, (features, EFFECTS); half of the effect is of each kind."""
        random = np.random.default_rng([self.seed, 0])
        dense = random.standard_normal(DENSE)
        categorical = random.standard_normal((len(self.table_rows), EFFECTS))
        return dense / np.sqrt(DENSE), categorical / np.sqrt(len(self.table_rows))

    @functools.cached_property
    def _scale_and_offset(self) -> tuple[float, float]:
        """What gives the effects the wanted AUC and click rate, by bisection over a sample."""
        effect = self._effect(*self._features(np.random.default_rng([self.seed, 3]), _PROBE))
        low, high = 0.0, 64.0
        for _ in range(30):
            scale = (low + high) / 2
            offset = _offset(scale * effect, self.click_rate)
            below = bayes_auc([_sigmoid(scale * effect + offset)]) < self.bayes_auc
            low, high = (scale, high) if below else (low, scale)
        return scale, offset

    def _features(self, random: np.random.Generator, samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        counts = np.exp(1.5 * random.standard_normal((samples, DENSE)) + 1).astype(np.int32)
        kind = random.random((samples, DENSE))
        counts[kind < NEGATIVE_COUNTS] = -1 - (counts[kind < NEGATIVE_COUNTS] % 2)
        counts[kind > 1 - MISSING_COUNTS] = _NO_COUNT
        categories = np.empty((samples, len(self.table_rows)), np.int64)
        for feature, rows in enumerate(self.table_rows):
            shares = np.cumsum(np.arange(1, rows) ** -ZIPF)
            categories[:, feature] = np.searchsorted(shares / shares[-1], random.random(samples), side="right")
        np.minimum(categories, np.array(self.table_rows) - 2, out=categories)
        categories[random.random(categories.shape) < MISSING_CATEGORIES] = MISSING
        return counts, categories

    def _effect(self, counts: NDArray[np.int32], categories: NDArray[np.int64]) -> NDArray[np.float64]:
        dense, categorical = self._weights
        logarithms = np.log1p(np.maximum(counts, 0))
        effect = (logarithms - 1.3) / 1.1 @ dense  # about their mean and deviation
        for feature, effects in enumerate(categorical):
            chosen = effects[categories[:, feature] % EFFECTS]
            effect += np.where(categories[:, feature] == MISSING, 0.0, chosen)
        return effect


def bayes_auc(click: Sequence[NDArray[np.float64]]) -> float:
    """The expected AUC of who ranks samples by their probability of a click, over the labels that they may have.

    It is the expected number of pairs of different samples, a click and none, that are in order, equal ones half, over
    the expected number of pairs. The ratio of the expectations is that of the areas for all but the smallest samples.

    Args:
        click: probabilities, in any number of parts.
    """
    values, counts = np.unique(np.concatenate(click), return_counts=True)
    clicks, others = values * counts, (1 - values) * counts
    before = np.cumsum(others) - others
    own = values * (1 - values) * counts  # a sample makes no pair with itself
    ordered = (clicks * (before + others / 2)).sum() - (own / 2).sum()
    return float(ordered / (clicks.sum() * others.sum() - own.sum()))


def _offset(effect: NDArray[np.float64], rate: float) -> float:
    low, high = -64.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(effect + middle).mean() < rate else (low, middle)
    return middle


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-values))
