"""The evaluation points of a run as they come: what is submitted, scored and logged, and which score ends the run."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from common.config.schema import BenchmarkConfig
from common.contract.evaluation import Evaluations, Score, Weights
from common.errors import DataError
from common.mlperf.events import RunEvents
from common.observe.metrics import MetricsWriter
from common.observe.progress_bar import Progress as ProgressBar


class EvaluationPoints:
    """Submits evaluations and notes their scores in order, each under the number of its own point.

    An evaluation begins in the log when the training before it is known to be done, since its weights are fixed from
    then on, and stops when its score is known. Where evaluation ranks are fast, that score may come first: it is noted
    once the evaluation has begun. After a score that reaches the target no other is noted.

    Args:
        evaluations: the way to evaluate.
        benchmark: metric and target.
        events, metrics, bar: where scores are written.
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
        self._begun: deque[tuple[int, int]] = deque()
        self._known: deque[Score] = deque()
        self.history = history
        self.scores: list[Score] = []
        self.passed: tuple[Score, int] | None = None

    @property
    def unscored(self) -> int:
        """Evaluations that have begun and have no score yet; where other ranks evaluate, rank 0 alone knows."""
        return len(self._begun)

    def begin(self, at: int, samples: int, time_ms: int | None = None) -> None:
        """Log that the evaluation at point ``at``, epochs or samples, begins, or began at ``time_ms``.

        Its weights have seen ``samples`` real training samples.
        """
        self._begun.append((at, samples))
        self._events.eval_start(at, time_ms)

    def submit(self, weights: Weights, samples: int) -> None:
        """Have the next point's weights evaluated, which are told apart by their nominal ``samples``; collective."""
        self._evaluations.submit(weights, samples)

    def poll(self) -> bool:
        """Note the scores that have come; whether one has reached the target by now.

        Then nothing counts any more, nor does what goes wrong in an evaluation.
        """
        if self.passed is None:
            self._known.extend(self._evaluations.poll())
        while self._known and self._begun:
            self._note(self._known.popleft())
        return self.passed is not None

    def finish(self) -> bool:
        """Note all scores as they come, but none after one that reaches the target; whether one has.

        All evaluations that were submitted have begun.
        """
        if not self.poll():
            for score in self._evaluations.finish():
                self._note(score)
                if self.passed is not None:
                    break
        return self.passed is not None

    def _note(self, score: Score) -> None:
        at, samples = self._begun.popleft()
        if self.passed is None:
            self._log(replace(score, samples=samples), at)

    def _log(self, score: Score, at: int) -> None:
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
