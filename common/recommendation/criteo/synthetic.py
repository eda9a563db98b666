"""Synthetic days of click logs as text, in Criteo's format, with a signal that a model can learn.

Clicks follow a known logistic model of dense and categorical features. Categories of a feature are Zipf-distributed,
and each has an effect on the click. The best possible classifier knows the probability of every click. Its area under
the ROC curve, the Bayes AUC, follows from the probabilities alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.recommendation.criteo.sample_rows import CATEGORICAL, DAYS, DENSE

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
_SAMPLES_PER_WORKER = 1 << 19
_CHUNK = 1 << 16  # lines that are written at a time


@dataclass(frozen=True)
class SyntheticClicks(Options):
    """Options of ``generate``.

    ``evaluation`` is half of the last day; the other half has as many samples. ``cap`` includes the missing category.
    """

    train: Annotated[int, Option("samples of all days except the last", least=DAYS - 1)] = 200_000
    evaluation: Annotated[int, Option("evaluated samples", "--eval", least=1)] = 20_000
    cap: Annotated[int, Option("largest number of categories of a feature", least=2)] = 1_000
    bayes_auc: Annotated[float, Option("AUC of the best possible classifier", "--auc")] = 0.8
    click_rate: Annotated[float, Option("fraction of clicks", least=0.01, most=0.5)] = 0.25
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.bayes_auc < 0.95:
            raise ConfigError(f"--auc={self.bayes_auc}: above 0.5 and below 0.95")

    def model(self, table_rows: tuple[int, ...]) -> LogisticModel:
        """Return the model for a benchmark with these tables."""
        categories = tuple(min(rows, self.cap) for rows in table_rows)
        return calibrated(categories, self.bayes_auc, self.click_rate, self.seed)

    def samples(self, day: int) -> int:
        """Return the number of samples of one day."""
        if day == DAYS - 1:
            return 2 * self.evaluation
        return self.train * (day + 1) // (DAYS - 1) - self.train * day // (DAYS - 1)


@dataclass(frozen=True)
class _Plan:
    path: Path
    model: LogisticModel
    samples: int
    day: int


def generate(
    raw_dir: Path, table_rows: tuple[int, ...], options: SyntheticClicks = SyntheticClicks(), workers: int = 1
) -> str:
    """Write days of a synthetic log to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Args:
        table_rows: table rows of the benchmark.

    Returns:
        a summary: numbers of samples, and the Bayes AUC of the evaluated samples.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    model = options.model(table_rows)
    with synthetic.generated(raw_dir) as folder:
        plans = [_Plan(folder / f"day_{day}", model, options.samples(day), day) for day in range(DAYS)]
        processes = min(workers, 1 + (options.train + 2 * options.evaluation) // _SAMPLES_PER_WORKER)
        clicks = list(synthetic.drawn(_write_day, plans, processes))
        auc = bayes_auc([clicks[-1][: options.evaluation]])
        described = {"kind": "planted logistic model", "asked": asdict(options), "bayes_auc": round(auc, 5)}
        synthetic.mark(folder, {**described, "table_rows": list(model.table_rows)})
    return f"{options.train:,} + {options.evaluation:,} samples in {DAYS} days, Bayes AUC {auc:.4f}"


def _write_day(plan: _Plan) -> NDArray[np.float64]:
    """Write a day; return the probabilities of its clicks."""
    clicks = []
    with open(plan.path, "wb") as file:
        for chunk, first in enumerate(range(0, plan.samples, _CHUNK)):
            drawn = plan.model.draw(min(_CHUNK, plan.samples - first), plan.day * 2**32 + chunk)
            counts = np.where(drawn.counts == drawn.no_count, b"", drawn.counts.astype("S11"))
            fields = [_characters(drawn.labels.astype("S1")), *(_characters(column) for column in counts.T)]
            for feature, (rows, own) in enumerate(zip(plan.model.table_rows, drawn.categories.T, strict=True)):
                digits = _hexadecimal(raw_categories(rows - 1, feature, plan.model.seed)[own])
                digits[own == MISSING] = 0
                fields.append(digits)
            file.write(_lines(fields))
            clicks.append(drawn.click)
    return np.concatenate(clicks)


def _hexadecimal(values: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the eight hexadecimal digits of each value, (N, 8)."""
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    return np.frombuffer(b"0123456789abcdef", np.uint8)[(values[:, None] >> shifts) & np.uint32(15)]


def _characters(texts: NDArray[np.bytes_]) -> NDArray[np.uint8]:
    """Return texts (N,) as characters (N, longest), padded with 0."""
    return np.ascontiguousarray(texts).view(np.uint8).reshape(len(texts), -1)


def _lines(fields: list[NDArray[np.uint8]]) -> bytes:
    """Join fields, each (N, characters), to N tab-separated lines, without the characters that are 0."""
    parts = []
    for number, field in enumerate(fields):
        end = b"\t" if number < len(fields) - 1 else b"\n"
        parts += [field, np.full((len(field), 1), end[0], np.uint8)]
    text = np.concatenate(parts, axis=1).reshape(-1)
    return text[text != 0].tobytes()


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
class LogisticModel:
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


def calibrated(table_rows: tuple[int, ...], best_auc: float, click_rate: float, seed: int) -> LogisticModel:
    """Return the model with a given Bayes AUC and click rate, found by bisection over a sample.

    Args:
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
    return LogisticModel(table_rows, seed, scale, offset)


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
