"""Evaluation in line with the training: the training ranks stop, predict and score."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.contract.evaluation import Evaluation, Score, Weights


class InlineEvaluation:
    """Runs an Evaluation on the training ranks at the moment it is submitted.

    Args:
        evaluation: the workload's evaluation, over the training layout. All ranks get the same predictions, so
            all score alike and no verdict has to travel.
    """

    ranked = False
    interrupted = False

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._scores: list[Score] = []

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Run on synthetic data before ``run_start``."""
        self._evaluation.warm_up()

    def open_data(self, root: Path) -> None:
        """Open the evaluation data; after ``run_start``."""
        self._evaluation.open_data(root)

    def submit(self, weights: Weights, samples: int) -> None:
        """Evaluate the weights, which have seen ``samples`` training samples; collective."""
        began = time.perf_counter()
        predictions = self._evaluation.predict(weights)
        values = self._evaluation.score(predictions)
        seconds = time.perf_counter() - began
        self._scores.append(Score(samples, values, time.time_ns() // 1_000_000, seconds, seconds))

    def poll(self) -> list[Score]:
        """The scores that have become known since the last poll, oldest first."""
        scores, self._scores = self._scores, []
        return scores

    def finish(self) -> Iterator[Score]:
        """Yield what no poll has returned; nothing is ever outstanding in line."""
        yield from self.poll()

    def dismiss(self, stopped_at: int) -> None:
        """Nobody else evaluates: nothing to do."""

    def close(self) -> None:
        """Close the evaluation data."""
        self._evaluation.close()
