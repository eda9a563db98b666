"""Synthetic days of click logs as text, in Criteo's format, with a signal that a model can learn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data import stand_in
from common.errors import ConfigError
from common.recommendation.criteo.planted import MISSING, World, bayes_auc, calibrated, raw_categories
from common.recommendation.criteo.sample_rows import DAYS

_SAMPLES_PER_WORKER = 1 << 19
_CHUNK = 1 << 16  # lines that are written at a time


@dataclass(frozen=True)
class Request:
    """Options for generated data.

    Attributes:
        train: samples of all days but the last, together.
        evaluation: samples of the first half of the last day, which is evaluated; the other half has as many.
        cap: largest number of categories of a feature, including the missing category.
        bayes_auc: AUC of the best possible classifier.
        click_rate: fraction of clicks.
        seed: seed of all random choices.
    """

    train: int = 200_000
    evaluation: int = 20_000
    cap: int = 1_000
    bayes_auc: float = 0.8
    click_rate: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train < DAYS - 1 or self.evaluation < 1:
            raise ConfigError(f"--train={self.train} --eval={self.evaluation}: at least one for each of {DAYS} days")
        if self.cap < 2 or self.seed < 0:
            raise ConfigError(f"--cap={self.cap} --seed={self.seed}: at least two categories, and a seed of 0 or more")
        if not 0.5 < self.bayes_auc < 0.95 or not 0.01 <= self.click_rate <= 0.5:
            raise ConfigError(
                f"--auc={self.bayes_auc} --click-rate={self.click_rate}: an AUC above 0.5 and below 0.95, and a rate "
                "from 0.01 to 0.5"
            )

    def world(self, table_rows: tuple[int, ...]) -> World:
        """Return the model for a benchmark with these tables."""
        categories = tuple(min(rows, self.cap) for rows in table_rows)
        return calibrated(categories, self.bayes_auc, self.click_rate, self.seed)

    def samples(self, day: int) -> int:
        """Return the number of samples of one day."""
        if day == DAYS - 1:
            return 2 * self.evaluation
        return self.train * (day + 1) // (DAYS - 1) - self.train * day // (DAYS - 1)


@dataclass(frozen=True)
class Generated:
    """Numbers of samples that were written, and the Bayes AUC of the evaluated samples."""

    train: int
    evaluation: int
    bayes_auc: float

    def __str__(self) -> str:
        return f"{self.train:,} + {self.evaluation:,} samples in {DAYS} days, Bayes AUC {self.bayes_auc:.4f}"


@dataclass(frozen=True)
class _DayFile:
    path: Path
    world: World
    samples: int
    day: int


def generate(raw_dir: Path, table_rows: tuple[int, ...], request: Request = Request(), workers: int = 1) -> Generated:
    """Write days of a synthetic log to ``raw_dir`` and mark it as synthetic.

    Args:
        raw_dir: an empty or new folder.
        table_rows: table rows of the benchmark.
        request: options.
        workers: processes.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    stand_in.require_unused(raw_dir)
    world = request.world(table_rows)
    with stand_in.generated(raw_dir) as folder:
        plans = [_DayFile(folder / f"day_{day}", world, request.samples(day), day) for day in range(DAYS)]
        processes = min(workers, 1 + (request.train + 2 * request.evaluation) // _SAMPLES_PER_WORKER)
        clicks = list(stand_in.drawn(_write_day, plans, processes))
        found = bayes_auc([clicks[-1][: request.evaluation]])
        described = {"kind": "planted logistic model", "asked": asdict(request), "bayes_auc": round(found, 5)}
        stand_in.mark(folder, {**described, "table_rows": list(world.table_rows)})
    return Generated(request.train, request.evaluation, found)


def _write_day(plan: _DayFile) -> NDArray[np.float64]:
    """Write a day; return the probabilities of its clicks."""
    clicks = []
    with open(plan.path, "wb") as file:
        for chunk, first in enumerate(range(0, plan.samples, _CHUNK)):
            drawn = plan.world.draw(min(_CHUNK, plan.samples - first), plan.day * 2**32 + chunk)
            counts = np.where(drawn.counts == drawn.no_count, b"", drawn.counts.astype("S11"))
            fields = [_characters(drawn.labels.astype("S1")), *(_characters(column) for column in counts.T)]
            for feature, (rows, own) in enumerate(zip(plan.world.table_rows, drawn.categories.T, strict=True)):
                digits = _hexadecimal(raw_categories(rows - 1, feature, plan.world.seed)[own])
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
