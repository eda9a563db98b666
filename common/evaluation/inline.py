"""Inline evaluation: the training ranks stop training and predict, and rank 0 scores."""

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
"""Time limit of the other ranks' wait for a score. Rank 0's progress is supervised separately."""


class InlineEvaluation:
    """Runs an Evaluation on the training ranks during :meth:`submit`.

    Rank 0 of the layout scores and sends the metrics through the job's store, without device communication.

    Args:
        first_rank: rank in the job of the layout's rank 0.
    """

    later = elsewhere = offline = interrupted = False

    def __init__(self, evaluation: Evaluation, layout: Layout, first_rank: int = 0) -> None:
        self._evaluation, self._layout, self._first_rank = evaluation, layout, first_rank
        self._scores: list[Score] = []

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Warm up on synthetic data, before ``run_start``."""
        self._evaluation.warm_up()
        if self._layout.rank == 0:
            self._evaluation.scorer.warm_up()

    def open_data(self, root: Path) -> None:
        """Open the evaluation data and, on rank 0, the ground truth; after ``run_start``."""
        self._evaluation.open_data(root)
        if self._layout.rank == 0:
            self._evaluation.scorer.open_data(root)

    def submit(self, weights: Weights, samples: int) -> None:
        """Evaluate weights that have seen ``samples`` training samples. Collective.

        Raises:
            PeerFailed: rank 0 could not score.
        """
        began = time.perf_counter()
        values = self._score(self._evaluation.predict(weights))
        seconds = time.perf_counter() - began
        self._scores.append(Score(samples, values, time.time_ns() // 1_000_000, seconds, seconds))

    def _score(self, predictions: Predictions | None) -> dict[str, float]:
        """Return the metrics, which rank 0 computes. If it fails, it sends an empty text, so that no rank waits."""
        answer = ""
        try:
            if self._layout.rank == 0:
                assert predictions is not None, "rank 0 predicts"
                answer = json.dumps(self._evaluation.scorer.score(predictions))
        finally:
            answer = job_store.from_rank(self._first_rank, "metrics", answer, LONGEST_SCORING)
        if not answer:
            raise PeerFailed("rank 0 could not score the evaluation")
        values: dict[str, float] = json.loads(answer)
        return values

    def poll(self) -> list[Score]:
        """Return the scores since the last poll, oldest first."""
        scores, self._scores = self._scores, []
        return scores

    def trained(self, point: Point) -> None:
        """Do nothing: this mode does not need the point."""

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield the scores that no poll has returned; none is ever pending."""
        yield from self.poll()

    def dismiss(self, stopped_at: int) -> None:
        """Do nothing: there are no evaluation ranks."""

    def close(self) -> None:
        """Close the evaluation data."""
        self._evaluation.close()
