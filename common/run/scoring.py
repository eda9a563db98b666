"""The evaluation points of a run as they come: what is submitted, scored and logged, and which score ends the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.config.schema import BenchmarkConfig
from common.contract.evaluation import Evaluations, Point, Score, Weights, never
from common.errors import DataError
from common.mlperf.events import RunEvents
from common.observe.metrics import MetricsWriter
from common.observe.progress_bar import Progress as ProgressBar

History = tuple[tuple[int, dict[str, float]], ...]


class EvaluationPoints:
    """Submits evaluations and notes their scores, each under the number of its own point.

    An evaluation begins in the log when the training before it is known to be done, since its weights are fixed from
    then on, and stops when its score is known. Where evaluation ranks are fast, that score may come first: it is noted
    once the evaluation has begun. After a score that reaches the target no other is noted.

    Offline, evaluations come in an order of their own, and not all of them. They are logged together at the end, each
    with the times of its scoring. The first checkpoint of the run that reaches the target is what counts, whenever
    it was scored.

    Args:
        evaluations: the way to evaluate.
        benchmark: metrics and targets.
        events, metrics, bar: where scores are written.
        history: (samples, metric to value) of the evaluations before a resumed run.

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
        history: History = (),
    ) -> None:
        self._evaluations = evaluations
        self._benchmark = benchmark
        self._events, self._metrics, self._bar = events, metrics, bar
        self._begun: dict[int, Point] = {}
        self._known: deque[Score] = deque()
        self.history = history
        self.scores: list[Score] = []
        self.passed: tuple[Score, int] | None = None

    @property
    def unscored(self) -> int:
        """Evaluations that have begun and have no score yet; where other ranks evaluate, rank 0 alone knows."""
        return len(self._begun)

    def begin(self, point: Point) -> None:
        """The weights of an evaluation point are known to be done: log that its evaluation begins, or began."""
        self._evaluations.trained(point)
        if not self._evaluations.offline:
            self._begun[point.samples] = point
            self._events.eval_start(point.at, point.time_ms)

    def submit(self, weights: Weights, samples: int) -> None:
        """Have the next point's weights evaluated, which are told apart by their nominal ``samples``; collective."""
        self._evaluations.submit(weights, samples)

    def poll(self) -> bool:
        """Note the scores that have come; whether one has reached the target by now.

        Then nothing counts any more, nor does what goes wrong in an evaluation; but offline an earlier checkpoint may.
        """
        if self.passed is None or self._evaluations.offline:
            self._known.extend(self._evaluations.poll())
        while self._known and (self._known[0].point is not None or self._known[0].samples in self._begun):
            self._note(self._known.popleft())
        return self.passed is not None

    def finish(self, stopping: Callable[[], bool] = never) -> bool:
        """Note all scores as they come, but none after one that reaches the target; whether one has.

        All evaluations that were submitted have begun. ``stopping`` is for :meth:`Evaluations.finish`.
        """
        if not self.poll() or self._evaluations.offline:
            for score in self._evaluations.finish(stopping):
                self._note(score)
                if self.passed is not None and not self._evaluations.offline:
                    break
        return self.passed is not None

    def log_checkpoints(self) -> None:
        """Log the evaluations of checkpoints, which were not logged when they were made."""
        if self._evaluations.offline:
            log_checkpoint_scores(self._events, self._benchmark, self.scores)

    def ending(self) -> tuple[Score, int] | None:
        """The score that ends the run and the number of its point: that which reached the target.

        Offline, where none did, it is the last checkpoint's that was scored.
        """
        if self.passed is not None or not self._evaluations.offline:
            return self.passed
        return ending_checkpoint(self._benchmark, self.scores)

    def _note(self, score: Score) -> None:
        point = self._begun.pop(score.samples) if score.point is None else score.point
        if self.passed is None or self._evaluations.offline:
            self._record(replace(score, samples=point.counted), point.at)

    def _record(self, score: Score, at: int) -> None:
        benchmark = self._benchmark
        require_whole_set(benchmark, score.values)
        values = benchmark.judged(score.values)
        self.scores.append(score)
        if not self._evaluations.offline:
            self._events.accuracy(values, at, score.time_ms)
            self._events.eval_stop(at, score.time_ms)
        if (score.samples, values) not in self.history:  # else a resumed run's queue had it
            self.history = (*self.history, (score.samples, values))
            times = {"seconds": score.seconds, "waited_seconds": score.waited_seconds}
            self._metrics.evaluation(score.samples, score.values, **times)
        self._bar.line(told(benchmark, values, at))
        if benchmark.reached(values) and (self.passed is None or score.samples < self.passed[0].samples):
            self.passed = score, at


def told(benchmark: BenchmarkConfig, values: dict[str, float], at: int) -> str:
    """An evaluation in words, with the targets."""
    said = [f"{metric} {value:.4f}, target {benchmark.targets[metric]}" for metric, value in values.items()]
    return f"evaluation at {at}: {'; '.join(said)}"


def require_whole_set(benchmark: BenchmarkConfig, values: dict[str, float]) -> None:
    """Raise DataError if an evaluation was of another number of samples than the recipe's."""
    counted = values.get("eval_samples", benchmark.eval_samples)
    if counted != benchmark.eval_samples:
        raise DataError(
            f"{counted:g} samples were evaluated, but the recipe is for {benchmark.eval_samples} of "
            f"{benchmark.data_set}: the ranks that evaluate read other data"
        )


def log_checkpoint_scores(events: RunEvents, benchmark: BenchmarkConfig, scores: Sequence[Score]) -> None:
    """Log evaluations of checkpoints in the order in which they were made."""
    for score in scores:
        assert score.point is not None, "a checkpoint's score has its point"
        assert score.scored_ms is not None, "a checkpoint's score has the times of its scoring"
        at, (began_ms, ended_ms) = score.point.at, score.scored_ms
        events.eval_start(at, began_ms)
        events.accuracy(benchmark.judged(score.values), at, ended_ms)
        events.eval_stop(at, ended_ms)


def ending_checkpoint(benchmark: BenchmarkConfig, scores: Sequence[Score]) -> tuple[Score, int] | None:
    """The first checkpoint of a run that reached the target, or else its last one, and the number of its point."""
    ordered = sorted((score for score in scores if score.point is not None), key=lambda score: score.samples)
    passing = [score for score in ordered if benchmark.reached(score.values)]
    chosen = passing[0] if passing else ordered[-1] if ordered else None
    return None if chosen is None or chosen.point is None else (chosen, chosen.point.at)
