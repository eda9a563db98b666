"""The evaluation points of a run as they come: what is submitted, scored and logged, and which score ends the run."""

from __future__ import annotations

from collections import deque

from common.config import BenchmarkConfig
from common.errors import DataError
from common.evaluation.base import Evaluations, Score, Weights
from common.mlperf.events import RunEvents
from common.observe.metrics import MetricsWriter
from common.observe.progress import Progress as ProgressBar


class EvaluationPoints:
    """Submits evaluations and notes their scores in order, each under the number of its own point.

    An evaluation starts in the log when it is submitted, since its weights are fixed from then on, and stops when its
    score is known. After a score that reaches the target no other is noted.

    Args:
        evaluations: the way to evaluate.
        benchmark: metric and target.
        events, metrics, bar: where scores are told.
        history: (samples, value) of the evaluations before a resumed run.

    Attributes:
        history: likewise, with those of this run.
        scores: of this run.
        passed: the score that reached the target and the number of its point; None before.
    """

    def __init__(
        self,
        evaluations: Evaluations,
        benchmark: BenchmarkConfig,
        events: RunEvents,
        metrics: MetricsWriter,
        bar: ProgressBar,
        history: tuple[tuple[int, float], ...] = (),
    ) -> None:
        self._evaluations = evaluations
        self._benchmark = benchmark
        self._events, self._metrics, self._bar = events, metrics, bar
        self._outstanding: deque[int] = deque()
        self.history = history
        self.scores: list[Score] = []
        self.passed: tuple[Score, int] | None = None

    def submit(self, weights: Weights, samples: int, at: int) -> None:
        """Begin the evaluation at point ``at``, epochs or samples; collective."""
        self._outstanding.append(at)
        self._events.eval_start(at)
        self._evaluations.submit(weights, samples)

    def poll(self) -> bool:
        """Note the scores that have come; whether one has reached the target by now."""
        for score in self._evaluations.poll():
            self._note(score)
        return self.passed is not None

    def finish(self) -> bool:
        """Note all scores as they come, but none after one that reaches the target; whether one has."""
        if not self.poll():
            for score in self._evaluations.finish():
                self._note(score)
                if self.passed is not None:
                    break
        return self.passed is not None

    def _note(self, score: Score) -> None:
        at = self._outstanding.popleft()
        if self.passed is None:
            self._tell(score, at)

    def _tell(self, score: Score, at: int) -> None:
        benchmark = self._benchmark
        counted = score.values.get("eval_samples", benchmark.eval_samples)
        if counted != benchmark.eval_samples:
            raise DataError(
                f"{counted:g} samples were evaluated, but the recipe is for {benchmark.eval_samples} of "
                f"{benchmark.data_set}: the ranks that evaluate read other data"
            )
        value = score.values[benchmark.metric]
        self.history = (*self.history, (score.samples, value))
        self.scores.append(score)
        self._events.accuracy(value, at, score.time_ms)
        self._events.eval_stop(at, score.time_ms)
        self._metrics.evaluation(
            score.samples, score.values, seconds=score.seconds, waited_seconds=score.waited_seconds
        )
        sign = ">=" if benchmark.direction == "higher" else "<="
        self._bar.line(f"evaluation at {at}: {benchmark.metric} {value:.4f}, target {sign} {benchmark.target:g}")
        if benchmark.reached(value):
            self.passed = score, at
