"""Evaluation with background scoring: the training ranks predict, and a separate process of rank 0 scores."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.contract.evaluation import Evaluation, Point, Score, Weights, never
from common.evaluation.scorer_process import ScoreAnswer, ScorerProcess

MOST_PENDING = 4
"""Largest number of pending evaluations. At this number, training waits for the oldest score, which bounds memory."""


@dataclass
class _Submitted:
    """An evaluation whose score is pending.

    Attributes:
        samples: training samples that the weights had seen.
        seconds: time for predicting and for copying the predictions to the scorer.
        waited: seconds for which training stood still.
    """

    samples: int
    seconds: float
    waited: float


class BackgroundEvaluation:
    """Predicts on the training ranks during :meth:`submit`; a separate process scores while training continues.

    Only rank 0 receives scores, in the order of submission. The time of a score, which counts for ``run_stop``, is
    when the process has computed it. The process runs on rank 0's machine, so both use the same clock.

    Args:
        process: process of the scorer; None on ranks other than 0. Its creator must close it too.
    """

    later = True
    elsewhere = offline = interrupted = False

    def __init__(self, evaluation: Evaluation, process: ScorerProcess | None) -> None:
        self._evaluation, self._process = evaluation, process
        self._submitted: deque[_Submitted] = deque()
        self._scores: list[Score] = []

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Send the scorer to its process, and warm up both on synthetic data, before ``run_start``."""
        if self._process is not None:
            self._process.begin(self._evaluation.scorer)
        self._evaluation.warm_up()
        if self._process is not None:
            self._process.wait()

    def open_data(self, root: Path) -> None:
        """Open the evaluation data, after ``run_start``. The scorer loads the ground truth in the background."""
        if self._process is not None:
            self._process.open_data(root)
        self._evaluation.open_data(root)

    def submit(self, weights: Weights, samples: int) -> None:
        """Predict with weights that have seen ``samples`` training samples, and request a score. Collective.

        Raises:
            RankFailure, SuiteError, RuntimeError: as :meth:`common.evaluation.scorer_process.ScorerProcess.poll`.
        """
        began = time.perf_counter()
        predictions = self._evaluation.predict(weights)
        if self._process is None:
            return
        assert predictions is not None, "rank 0 predicts"
        behind = time.perf_counter()
        while self._process.pending >= MOST_PENDING:
            self._take(self._process.wait())
        behind = time.perf_counter() - behind
        self._process.submit(predictions, samples)
        waited = time.perf_counter() - began
        self._submitted.append(_Submitted(samples, waited - behind, waited))

    def poll(self) -> list[Score]:
        """Return scores that :meth:`submit` took, or the next; empty except on rank 0. Raises as :meth:`submit`."""
        if self._process is not None and not self._scores:
            self._take(self._process.poll())
        return self._arrived()

    def trained(self, point: Point) -> None:
        """Do nothing: this mode does not need the point."""

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield the scores as they arrive until none is pending; nothing on ranks other than 0.

        Raises:
            RankFailure, SuiteError, RuntimeError: as :meth:`submit`.
        """
        yield from self._arrived()
        while self._process is not None and self._submitted:
            began = time.perf_counter()
            judged = self._process.wait()
            self._submitted[0].waited += time.perf_counter() - began
            self._take(judged)
            yield from self._arrived()

    def dismiss(self, stopped_at: int) -> None:
        """Do nothing: there are no evaluation ranks."""

    def close(self) -> None:
        """Close the evaluation data and end the scorer, even if it is computing a score that no longer counts."""
        self._evaluation.close()
        if self._process is not None:
            self._process.close()

    def _arrived(self) -> list[Score]:
        scores, self._scores = self._scores, []
        return scores

    def _take(self, judged: ScoreAnswer | None) -> None:
        """Store the score in an answer of the scorer; ``judged`` None: the answer has no score."""
        if judged is None:
            return
        of = self._submitted.popleft()
        self._scores.append(Score(of.samples, judged.values, judged.time_ms, of.seconds + judged.seconds, of.waited))
