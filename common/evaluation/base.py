"""The evaluation side of the contract, as the rules of a benchmark define its metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """What an evaluation uses: parameters, averaged batch-norm statistics, EMA. Name to tensor on the device."""

    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Predictions:
    """What ``predict`` hands to ``score``: CPU values that pickle. The same on every rank."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """A judged evaluation.

    Attributes:
        samples: training samples, over all ranks, that the weights had seen.
        values: metric name to value.
        time_ms: the time that counts for ``run_stop``, milliseconds since the epoch.
    """

    samples: int
    values: dict[str, float]
    time_ms: int


class Evaluation(ABC):
    """Predict with given weights over the evaluation set, and score the predictions."""

    def warm_up(self) -> None:
        """Run once on synthetic data before ``run_start``: plans, graphs, memory. Default: nothing."""

    @abstractmethod
    def open_data(self, root: Path) -> None:
        """Open the evaluation data under ``root``; the first touch of them. After ``run_start``."""

    @abstractmethod
    def predict(self, weights: Weights) -> Predictions:
        """Predict over the whole evaluation set; collective over the evaluation's layout."""

    @staticmethod
    @abstractmethod
    def score(predictions: Predictions) -> dict[str, float]:
        """The metrics of ``predictions``; on the CPU, possibly in another process."""

    def close(self) -> None:
        """Stop readers and close files. Default: nothing."""
