"""Evaluation in line with the training: the training ranks stop and predict, and rank 0 scores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from common.contract.evaluation import Evaluation, Point, Predictions, Score, Weights, never
from common.distributed import job_store
from common.distributed.faults import PeerFailed
from common.distributed.layout import Layout

LONGEST_SCORING = timedelta(hours=24)
"""For the other ranks to wait: rank 0 is watched for its progress."""


class InlineEvaluation:
    """Runs an Evaluation on the training ranks at the moment it is submitted.

    Rank 0 of the layout scores and tells the others through the job's store, so that nothing waits for a device.

    Args:
        evaluation: the workload's evaluation, over ``layout``.
        layout: the ranks that evaluate.
        first_rank: the rank in the job of the layout's rank 0.
    """

    later = elsewhere = offline = interrupted = False

    def __init__(self, evaluation: Evaluation, layout: Layout, first_rank: int = 0) -> None:
        self._evaluation, self._layout, self._first_rank = evaluation, layout, first_rank
        self._scores: list[Score] = []

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Run on synthetic data before ``run_start``."""
        self._evaluation.warm_up()
        if self._layout.rank == 0:
            self._evaluation.scorer.warm_up()

    def open_data(self, root: Path) -> None:
        """Open the evaluation data, and the ground truth where it is scored; after ``run_start``."""
        self._evaluation.open_data(root)
        if self._layout.rank == 0:
            self._evaluation.scorer.open_data(root)

    def submit(self, weights: Weights, samples: int) -> None:
        """Evaluate the weights, which have seen ``samples`` training samples; collective.

        Raises:
            PeerFailed: rank 0 could not score.
        """
        began = time.perf_counter()
        values = self._score(self._evaluation.predict(weights))
        seconds = time.perf_counter() - began
        self._scores.append(Score(samples, values, time.time_ns() // 1_000_000, seconds, seconds))

    def _score(self, predictions: Predictions | None) -> dict[str, float]:
        """The metrics, which rank 0 computes; it tells of a failure too, since the others would wait for its word."""
        told = ""
        try:
            if self._layout.rank == 0:
                assert predictions is not None, "rank 0 predicts"
                told = json.dumps(self._evaluation.scorer.score(predictions))
        finally:
            told = job_store.from_rank(self._first_rank, "metrics", told, LONGEST_SCORING)
        if not told:
            raise PeerFailed("rank 0 could not score the evaluation")
        values: dict[str, float] = json.loads(told)
        return values

    def poll(self) -> list[Score]:
        """The scores that have become known since the last poll, oldest first."""
        scores, self._scores = self._scores, []
        return scores

    def trained(self, point: Point) -> None:
        """Known already."""

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield what no poll has returned; nothing is ever outstanding in line."""
        yield from self.poll()

    def dismiss(self, stopped_at: int) -> None:
        """Nobody else evaluates: nothing to do."""

    def close(self) -> None:
        """Close the evaluation data."""
        self._evaluation.close()
