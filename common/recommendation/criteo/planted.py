"""Synthetic click logs where clicks follow a known logistic model of dense and categorical features.

Categories of a feature are Zipf-distributed, and each has an effect on the click. The best possible classifier knows
the probability of every click. Its area under the ROC curve, the Bayes AUC, follows from the probabilities alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.recommendation.criteo.sample_rows import CATEGORICAL, DENSE

ZIPF = 1.05
"""Exponent of the categories' frequencies."""
MISSING = -1
"""Value of a missing category."""
EFFECTS = 64
"""Number of different effects of a feature; category c has effect number c % 64."""
MISSING_COUNTS, MISSING_CATEGORIES, NEGATIVE_COUNTS = 0.1, 0.05, 0.03
"""Fractions of the fields."""
_NO_COUNT = np.iinfo(np.int32).min
_PROBE = 50_000


@dataclass(frozen=True)
class PlantedSamples:
    """N samples of the model.

    Attributes:
        counts: int32, (N, 13); :attr:`no_count` if missing.
        categories: int64, (N, features), index by falling frequency; :data:`MISSING` if missing.
        click: probability of a click, (N,).
        labels: (N,), 0 or 1.
    """

    counts: NDArray[np.int32]
    categories: NDArray[np.int64]
    click: NDArray[np.float64]
    labels: NDArray[np.int64]

    no_count = _NO_COUNT


@dataclass(frozen=True)
class World:
    """The model; :func:`calibrated` creates one.

    Attributes:
        table_rows: number of categories of each feature, at least 2, including the missing category.
        seed: seed of all random choices.
        scale, offset: applied to the effects, in log odds.
    """

    table_rows: tuple[int, ...]
    seed: int
    scale: float
    offset: float

    def draw(self, samples: int, number: int) -> PlantedSamples:
        """Draw ``samples``; each ``number`` gives other samples."""
        random = np.random.default_rng([self.seed, 1, number])
        counts, categories = _features(random, self.table_rows, samples)
        effect = _effect(counts, categories, *weights(len(self.table_rows), self.seed))
        click = _sigmoid(self.scale * effect + self.offset)
        return PlantedSamples(counts, categories, click, (random.random(samples) < click).astype(np.int64))


def calibrated(table_rows: tuple[int, ...], best_auc: float, click_rate: float, seed: int) -> World:
    """Return the model with a given Bayes AUC and click rate, found by bisection over a sample.

    Args:
        table_rows, seed: see :class:`World`.
        best_auc: target of the Bayes AUC.
        click_rate: target of the mean probability of a click.
    """
    features = _features(np.random.default_rng([seed, 3]), table_rows, _PROBE)
    effect = _effect(*features, *weights(len(table_rows), seed))
    low, high = 0.0, 64.0
    for _ in range(30):
        scale = (low + high) / 2
        offset = _offset(scale * effect, click_rate)
        below = bayes_auc([_sigmoid(scale * effect + offset)]) < best_auc
        low, high = (scale, high) if below else (low, scale)
    return World(table_rows, seed, scale, offset)


@functools.lru_cache(maxsize=CATEGORICAL)
def raw_categories(rows: int, feature: int, seed: int) -> NDArray[np.uint32]:
    """Return ``rows`` different raw numbers for a feature's categories, of 32 bits, and not 0."""
    random = np.random.default_rng([seed, 2, feature])
    drawn = np.unique(random.integers(1, 2**32, 2 * rows + 16, dtype=np.uint32))
    while len(drawn) < rows:
        more = random.integers(1, 2**32, rows, dtype=np.uint32)
        drawn = np.unique(np.concatenate([drawn, more]))
    return random.permutation(drawn)[:rows]


def weights(features: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the weights of dense features, (13,), and of categories, (features, EFFECTS), with equal total effect."""
    random = np.random.default_rng([seed, 0])
    dense = random.standard_normal(DENSE)
    categorical = random.standard_normal((features, EFFECTS))
    return dense / np.sqrt(DENSE), categorical / np.sqrt(features)


@functools.lru_cache(maxsize=CATEGORICAL)
def _zipf(categories: int) -> NDArray[np.float64]:
    """Return the cumulative frequencies of the categories."""
    shares = np.cumsum(np.arange(1, categories + 1) ** -ZIPF)
    return shares / shares[-1]


def _features(
    random: np.random.Generator, table_rows: tuple[int, ...], samples: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    counts = np.exp(1.5 * random.standard_normal((samples, DENSE)) + 1).astype(np.int32)
    kind = random.random((samples, DENSE))
    counts[kind < NEGATIVE_COUNTS] = -1 - (counts[kind < NEGATIVE_COUNTS] % 2)
    counts[kind > 1 - MISSING_COUNTS] = _NO_COUNT
    categories = np.empty((samples, len(table_rows)), np.int64)
    for feature, rows in enumerate(table_rows):
        categories[:, feature] = np.searchsorted(_zipf(rows - 1), random.random(samples), side="right")
    categories[random.random(categories.shape) < MISSING_CATEGORIES] = MISSING
    return counts, categories


def _effect(
    counts: NDArray[np.int32],
    categories: NDArray[np.int64],
    dense: NDArray[np.float64],
    categorical: NDArray[np.float64],
) -> NDArray[np.float64]:
    logarithms = np.log1p(np.maximum(counts, 0))
    effect: NDArray[np.float64] = (logarithms - 1.3) / 1.1 @ dense  # normalised with approximate mean and deviation
    for feature, effects in enumerate(categorical):
        chosen = effects[categories[:, feature] % EFFECTS]
        effect += np.where(categories[:, feature] == MISSING, 0.0, chosen)
    return effect


def bayes_auc(click: Sequence[NDArray[np.float64]]) -> float:
    """Return the expected AUC of a classifier that ranks samples by their true click probability.

    It is the expected number of pairs of different samples, one with and one without click, that are in order, with
    ties counted half, divided by the expected number of pairs. This ratio of expectations differs from the expected
    ratio only for very few samples.

    Args:
        click: probabilities, in any number of parts.
    """
    values, counts = np.unique(np.concatenate(click), return_counts=True)
    clicks, others = values * counts, (1 - values) * counts
    before = np.cumsum(others) - others
    own = values * (1 - values) * counts  # a sample does not form a pair with itself
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
