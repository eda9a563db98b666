"""Tracks the evaluation points of a run: submission, scores, log, and which score ends the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.config.schema import BenchmarkConfig
from common.contract.evaluation import Evaluations, Point, Score, Weights, never
from common.errors import DataError
from common.mlperf.events import RunEvents
from common.observe.metrics import MetricsWriter
from common.observe.progress_bar import ProgressBar

History = tuple[tuple[int, dict[str, float]], ...]


class EvaluationPoints:
    """Submits evaluations and records their scores, each for its evaluation point.

    In the log, an evaluation starts when the training before it is known to be finished, because its weights are fixed
    then, and stops when its score arrives. Fast evaluation ranks may deliver the score first; it is recorded once the
    evaluation has started. After a score that reaches the target, no other is recorded.

    Offline, only some evaluations are scored, in another order. They are logged together at the end with the times of
    their scoring. The first checkpoint of the run that reaches the target counts, whenever it was scored.

    Args:
        history: evaluations before a resumed run: (real training samples, metric to value).

    Attributes:
        history: the same, extended by the evaluations of this run.
        passed: the score that reached the target, and its epochs or samples in the log; None before.
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
        """Number of evaluations that have begun but have no score yet; with evaluation ranks, valid only on rank 0."""
        return len(self._begun)

    def begin(self, point: Point) -> None:
        """Log the start of an evaluation whose weights are now known to be finished."""
        self._evaluations.trained(point)
        if not self._evaluations.offline:
            self._begun[point.samples] = point
            self._events.eval_start(point.at, point.time_ms)

    def submit(self, weights: Weights, samples: int) -> None:
        """Submit weights for evaluation; their nominal ``samples`` identify the evaluation point. Collective."""
        self._evaluations.submit(weights, samples)

    def poll(self) -> bool:
        """Record the scores that have arrived. Return whether one has reached the target so far.

        After that, scores and errors of other evaluations are ignored, except offline, where an earlier checkpoint may
        also reach the target.
        """
        if self.passed is None or self._evaluations.offline:
            self._known.extend(self._evaluations.poll())
        while self._known and (self._known[0].point is not None or self._known[0].samples in self._begun):
            self._note(self._known.popleft())
        return self.passed is not None

    def finish(self, stopping: Callable[[], bool] = never) -> bool:
        """Wait for all scores, or until one reaches the target. Return whether one has reached it.

        All submitted evaluations have begun. ``stopping``: see :meth:`Evaluations.finish`.
        """
        if not self.poll() or self._evaluations.offline:
            for score in self._evaluations.finish(stopping):
                self._note(score)
                if self.passed is not None and not self._evaluations.offline:
                    break
        return self.passed is not None

    def log_checkpoints(self) -> None:
        """Log the evaluations of checkpoints, which offline runs do not log earlier."""
        if self._evaluations.offline:
            log_checkpoint_scores(self._events, self._benchmark, self.scores)

    def ending(self) -> tuple[Score, int] | None:
        """Return the score that ends the run, and its epochs or samples in the log; None if none does.

        It is the score that reached the target. Offline, if none has, it is that of the last scored checkpoint.
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
        if (score.samples, values) not in self.history:  # a resumed run may find old scores in the queue
            self.history = (*self.history, (score.samples, values))
            times = {"seconds": score.seconds, "waited_seconds": score.waited_seconds}
            self._metrics.evaluation(score.samples, score.values, **times)
        self._bar.line(evaluation_line(benchmark, values, at))
        if benchmark.reached(values) and (self.passed is None or score.samples < self.passed[0].samples):
            self.passed = score, at


def evaluation_line(benchmark: BenchmarkConfig, values: dict[str, float], at: int) -> str:
    """Format an evaluation with its targets as text.

    Args:
        at: epochs or samples of the evaluation, as in the log.
    """
    parts = [f"{metric} {value:.4f}, target {benchmark.targets[metric]}" for metric, value in values.items()]
    return f"evaluation at {at}: {'; '.join(parts)}"


def require_whole_set(benchmark: BenchmarkConfig, values: dict[str, float]) -> None:
    """Raise DataError if an evaluation had another number of samples than the recipe."""
    counted = values.get("eval_samples", benchmark.eval_samples)
    if counted != benchmark.eval_samples:
        raise DataError(
            f"{counted:g} samples were evaluated, but the recipe is for {benchmark.eval_samples} of "
            f"{benchmark.data_set} data: the ranks that evaluate read other data"
        )


def log_checkpoint_scores(events: RunEvents, benchmark: BenchmarkConfig, scores: Sequence[Score]) -> None:
    """Log evaluations of checkpoints in the given order, which is that of their scoring."""
    for score in scores:
        assert score.point is not None, "a checkpoint's score has its point"
        assert score.scored_ms is not None, "a checkpoint's score has the times of its scoring"
        at, (began_ms, ended_ms) = score.point.at, score.scored_ms
        events.eval_start(at, began_ms)
        events.accuracy(benchmark.judged(score.values), at, ended_ms)
        events.eval_stop(at, ended_ms)


def ending_checkpoint(benchmark: BenchmarkConfig, scores: Sequence[Score]) -> tuple[Score, int] | None:
    """Return the first checkpoint that reached the target, or else the last one, with its epochs or samples."""
    ordered = sorted((score for score in scores if score.point is not None), key=lambda score: score.samples)
    passing = [score for score in ordered if benchmark.reached(score.values)]
    chosen = passing[0] if passing else ordered[-1] if ordered else None
    return None if chosen is None or chosen.point is None else (chosen, chosen.point.at)
