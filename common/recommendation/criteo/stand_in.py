"""Synthetic days of click logs as text, in Criteo's format, with a signal that a model can learn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.data import stand_in
from common.data.options import Option, Options
from common.errors import ConfigError
from common.recommendation.criteo.planted import MISSING, World, bayes_auc, calibrated, raw_categories
from common.recommendation.criteo.sample_rows import DAYS

_SAMPLES_PER_WORKER = 1 << 19
_CHUNK = 1 << 16  # lines that are written at a time


@dataclass(frozen=True)
class SyntheticClicks(Options):
    """Options of ``generate``.

    ``evaluation`` is half of the last day; the other half has as many samples. ``cap`` includes the missing category.
    """

    train: Annotated[int, Option("samples of all days but the last", least=DAYS - 1)] = 200_000
    evaluation: Annotated[int, Option("evaluated samples", "--eval", least=1)] = 20_000
    cap: Annotated[int, Option("most categories of a feature", least=2)] = 1_000
    bayes_auc: Annotated[float, Option("of the best classifier", "--auc")] = 0.8
    click_rate: Annotated[float, Option("fraction of clicks", least=0.01, most=0.5)] = 0.25
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.bayes_auc < 0.95:
            raise ConfigError(f"--auc={self.bayes_auc}: above 0.5 and below 0.95")

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
class _Plan:
    path: Path
    world: World
    samples: int
    day: int


def generate(
    raw_dir: Path, table_rows: tuple[int, ...], options: SyntheticClicks = SyntheticClicks(), workers: int = 1
) -> str:
    """Write days of a synthetic log to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Args:
        table_rows: table rows of the benchmark.
        workers: processes.

    Returns:
        a summary: numbers of samples, and the Bayes AUC of the evaluated samples.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    world = options.world(table_rows)
    with stand_in.generated(raw_dir) as folder:
        plans = [_Plan(folder / f"day_{day}", world, options.samples(day), day) for day in range(DAYS)]
        processes = min(workers, 1 + (options.train + 2 * options.evaluation) // _SAMPLES_PER_WORKER)
        clicks = list(stand_in.drawn(_write_day, plans, processes))
        auc = bayes_auc([clicks[-1][: options.evaluation]])
        described = {"kind": "planted logistic model", "asked": asdict(options), "bayes_auc": round(auc, 5)}
        stand_in.mark(folder, {**described, "table_rows": list(world.table_rows)})
    return f"{options.train:,} + {options.evaluation:,} samples in {DAYS} days, Bayes AUC {auc:.4f}"


def _write_day(plan: _Plan) -> NDArray[np.float64]:
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
