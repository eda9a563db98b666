"""Evaluation whose scoring training does not wait for: the training ranks predict, and a process of rank 0's scores."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.contract.evaluation import Evaluation, Point, Score, Weights, never
from common.evaluation.scorer_process import Judged, ScorerProcess

MOST_OWED = 4
"""Evaluations that the scorer may be behind with; then training waits for the oldest, so that memory stays bounded."""


@dataclass
class _Submitted:
    """An evaluation whose score has not come.

    Attributes:
        samples: training samples that the weights had seen.
        seconds: that predicting and handing over took.
        waited: seconds that training stood still.
    """

    samples: int
    seconds: float
    waited: float


class BackgroundEvaluation:
    """Predicts on the training ranks at the moment of submission, and has a process score while training goes on.

    The scores come to rank 0 alone, in the order of submission. The time of a score, which counts for ``run_stop``, is
    when the process knows it: its clock is that of rank 0.

    Args:
        evaluation: the workload's evaluation, over the training layout.
        process: the scorer's, which whoever started it ends; None on ranks other than 0.
    """

    later = True
    elsewhere = offline = interrupted = False

    def __init__(self, evaluation: Evaluation, process: ScorerProcess | None) -> None:
        self._evaluation, self._process = evaluation, process
        self._submitted: deque[_Submitted] = deque()
        self._scores: list[Score] = []

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Run on synthetic data, and bring the scorer to its process, before ``run_start``."""
        if self._process is not None:
            self._process.begin(self._evaluation.scorer)
        self._evaluation.warm_up()
        if self._process is not None:
            self._process.wait()

    def open_data(self, root: Path) -> None:
        """Open the evaluation data; after ``run_start``. Nobody waits for the scorer, which loads the ground truth."""
        if self._process is not None:
            self._process.open_data(root)
        self._evaluation.open_data(root)

    def submit(self, weights: Weights, samples: int) -> None:
        """Predict with the weights, which have seen ``samples`` training samples, and hand over; collective.

        Raises:
            RankFailure, SuiteError, RuntimeError: as :meth:`common.evaluation.scorer_process.ScorerProcess.poll`.
        """
        began = time.perf_counter()
        predictions = self._evaluation.predict(weights)
        if self._process is None:
            return
        assert predictions is not None, "rank 0 predicts"
        behind = time.perf_counter()
        while self._process.owes >= MOST_OWED:
            self._take(self._process.wait())
        behind = time.perf_counter() - behind
        self._process.submit(predictions, samples)
        waited = time.perf_counter() - began
        self._submitted.append(_Submitted(samples, waited - behind, waited))

    def poll(self) -> list[Score]:
        """The next score if it has come; on ranks other than 0 none ever. Raises as :meth:`submit`."""
        if self._process is not None and not self._scores:
            self._take(self._process.poll())
        return self._told()

    def trained(self, point: Point) -> None:
        """Known already."""

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield the scores as they come until none is outstanding; on ranks other than 0 nothing.

        Raises:
            RankFailure, SuiteError, RuntimeError: as :meth:`submit`.
        """
        yield from self._told()
        while self._process is not None and self._submitted:
            began = time.perf_counter()
            judged = self._process.wait()
            self._submitted[0].waited += time.perf_counter() - began
            self._take(judged)
            yield from self._told()

    def dismiss(self, stopped_at: int) -> None:
        """No other rank evaluates: nothing to do."""

    def close(self) -> None:
        """Close the evaluation data, and end the scorer, which may be at a score that no longer counts."""
        self._evaluation.close()
        if self._process is not None:
            self._process.close()

    def _told(self) -> list[Score]:
        scores, self._scores = self._scores, []
        return scores

    def _take(self, judged: Judged | None) -> None:
        """Note a score, if it is one."""
        if judged is None:
            return
        of = self._submitted.popleft()
        self._scores.append(Score(of.samples, judged.values, judged.time_ms, of.seconds + judged.seconds, of.waited))
