"""Offline evaluation: checkpoints are queued on disk and scored separately, while training continues.

The job's evaluation ranks score them during training. Without such ranks, the training ranks score after training, or
``mlperf-suite score`` after the run. :func:`common.evaluation.checkpoint_queue.next_to_score` selects them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time_ns
from typing import Any

from torch import Tensor

from common.config.schema import EvaluationConfig, RunConfig, SessionConfig
from common.contract.evaluation import Point, Score, Weights, never
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.layout import Layout
from common.distributed.messages import Message, MessageReceiver, MessageSender
from common.distributed.tensor_split import gathered, without_padding
from common.distributed.weights import Template
from common.errors import CheckpointError, Interrupted
from common.evaluation.checkpoint_queue import Checkpoint, CheckpointQueue, CheckpointScore, next_to_score
from common.evaluation.checkpoint_scoring import CheckpointScoring
from common.evaluation.checkpoint_writer import CheckpointWriter

SIGNAL_SECONDS = 0.5
"""Interval at which a wait for scores checks for signals, in seconds."""


@dataclass(frozen=True)
class OfflineRun:
    """Properties of the run that its checkpoint queue needs.

    Attributes:
        described: JSON values that another process needs to score the checkpoints.
        resumed_step: step from which the run continues; None for a new run.
    """

    folder: Path
    described: Mapping[str, Any]
    resumed_step: int | None
    print_line: Callable[[str], None]

    @classmethod
    def of(
        cls,
        run: RunConfig,
        session: SessionConfig,
        tree: Mapping[str, Any],
        seed: int,
        log_name: str,
        resumed_step: int | None,
        print_line: Callable[[str], None],
    ) -> OfflineRun:
        """Return the description of a run whose composed configuration is ``tree``."""
        tree = {**tree, "micro_batch": run.micro_batch, "resume": None, "data_dir": str(session.data_dir.absolute())}
        if run.assets_dir is not None:
            tree["assets_dir"] = str(run.assets_dir.absolute())
        described = {"configuration": tree, "seed": seed, "log": log_name}
        return cls(session.output_dir, described, resumed_step, print_line)


class OfflineEvaluation:
    """Writes a checkpoint of the evaluated weights at every evaluation point, and collects the scores of checkpoints.

    Rank 0 writes, and only rank 0 receives scores. The time of a score, which counts for ``run_stop``, is that of the
    last weight update before the checkpoint; if self-play makes the data, it is the time after the model was saved.

    Args:
        config: which ranks or command score, and the first checkpoint to score.
        reached: returns whether the metrics of a checkpoint meet the targets.
        workload: trained workload; it builds an evaluation only if the training ranks score.
    """

    later = elsewhere = offline = True

    def __init__(
        self,
        config: EvaluationConfig,
        reached: Callable[[Mapping[str, float]], bool],
        workload: Workload,
        layout: Layout,
        run: OfflineRun,
    ) -> None:
        self._config, self._workload, self._layout, self._run = config, workload, layout, run
        self._queue = CheckpointQueue(run.folder, reached, config.begins_with)
        self._scoring: CheckpointScoring | None = None
        if not config.ranks and not config.by_command:
            self._scoring = CheckpointScoring(workload, layout, self._queue.folder)
        self._writer: CheckpointWriter | None = None
        self._orders: MessageSender | None = None
        self._reports: MessageReceiver | None = None
        self._files: deque[Path] = deque()
        self._points: deque[Point] = deque()
        self._waits: deque[float] = deque()
        self._waited: dict[int, float] = {}
        self._known: list[Score] = []
        self._root = Path()
        self._done = False
        self.interrupted = False

    @property
    def complete(self) -> bool:
        """Whether training has ended and all of its checkpoints are on disk. Valid on rank 0."""
        return self._queue.complete

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Create the queue and the buffers of the weights, and connect to the evaluation ranks."""
        tensors = self._whole(weights())
        token = job_store.from_rank_0("offline", secrets.token_hex(8))
        if self._layout.rank:
            return
        self._queue.begin(self._run.resumed_step, self._run.described)
        template = Template.of(tensors, 1)
        self._writer = CheckpointWriter(self._queue.folder, template, self._layout.device, self._config.buffers)
        if self._config.ranks:
            self._orders, self._reports = MessageSender(f"orders/{token}"), MessageReceiver(f"scores/{token}")
            for number, checkpoint in sorted(self._queue.checkpoints.items()):
                found = self._queue.scores.get(number)
                self._orders.send(checkpoint=asdict(checkpoint), values=None if found is None else found.values)
        self._known = [self._score(number, score) for number, score in sorted(self._queue.scores.items())]

    def open_data(self, root: Path) -> None:
        """Store ``root``. The ranks that score open the data later."""
        self._root = root

    def submit(self, weights: Weights, samples: int) -> None:
        """Submit the weights to the writer. Collective.

        Waits only if all ``evaluation.buffers`` host buffers are waiting for the disk, until one is free.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
        """
        tensors = self._whole(weights)
        if self._writer is None:
            return
        before = self._writer.waited_seconds
        self._writer.write(tensors)
        self._waits.append(self._writer.waited_seconds - before)
        if self._waits[-1] > 0.01:
            self._run.print_line(
                f"training stood still for {self._waits[-1]:.2f} s: the {self._config.buffers} checkpoints of "
                "evaluation.buffers waited for the disk"
            )

    def trained(self, point: Point) -> None:
        """Name the next checkpoint, now that the training of its weights is finished."""
        if self._layout.rank == 0:
            self._points.append(point if point.time_ms else replace(point, time_ms=time_ns() // 1_000_000))
            self._publish(wait=False)

    def wait_for_disk(self) -> None:
        """Wait until all checkpoints with known points are in the queue; a resumed run does not write them again.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        self._publish(wait=True)

    def poll(self) -> list[Score]:
        """Return the scores that have arrived; always empty on ranks other than 0.

        Raises:
            CheckpointError: a checkpoint could not be written.
            RuntimeError: an evaluation rank is gone.
        """
        self._publish(wait=False)
        if self._reports is not None:
            for message in self._reports.collect():
                self._take(message)
        known, self._known = self._known, []
        return known

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Complete the queue, and yield scores until the first passing checkpoint is known or no checkpoint is left.

        Yields only already known scores if ``mlperf-suite score`` is to score. Collective; yields on rank 0 only.

        Raises:
            Interrupted: a signal asked to stop; the queue is complete, and scoring can continue later.
            CheckpointError: a checkpoint could not be written, or is missing.
            RuntimeError: an evaluation rank is gone.
        """
        self._publish(wait=True)
        if self._layout.rank == 0:
            self._queue.end()
        yield from self.poll()
        if self._config.ranks:
            yield from self._reported(stopping)
        elif self._scoring is not None:
            yield from self._scored(self._scoring, stopping)

    def dismiss(self, stopped_at: int) -> None:
        """Send the evaluation ranks the end of the run, and wait until they have left.

        Args:
            stopped_at: step at which a signal stopped the run; 0 for a run that ended by itself.
        """
        if self._orders is not None and self._reports is not None:
            self._orders.send(stopped_at=stopped_at)
            self._orders.end()
            self._reports.wait_for_end()

    def close(self) -> None:
        """Finish pending writes. Errors are ignored: they were reported before, or the run has already ended."""
        if self._scoring is not None:
            self._scoring.close()
        if self._writer is not None:
            self._writer.close()
            self._orders = None
            with contextlib.suppress(CheckpointError):
                self._publish(wait=False)
            for partial in self._files:  # their training steps were not known to be finished
                partial.unlink(missing_ok=True)

    def _whole(self, weights: Weights) -> dict[str, Tensor]:
        """Return the weights without sharding over ``tp``, and without padding. Collective over ``tp``."""
        tp_ranks, splits, device = self._layout.group("tp"), self._workload.tensor_splits(), self._layout.device
        if tp_ranks is None:
            return without_padding(weights.tensors, splits)
        tensors: dict[str, Tensor] = gathered(weights.tensors, splits, tp_ranks, self._layout, device)
        return tensors

    def _publish(self, wait: bool) -> None:
        """Add the checkpoints that are complete and have a known point to the queue; ``wait``: first complete all."""
        if self._writer is None:
            return
        self._files.extend(self._writer.collect(wait))
        while self._files and self._points:
            checkpoint = Checkpoint.of(self._points.popleft())
            self._queue.add(checkpoint, self._files.popleft())
            self._waited[checkpoint.point.number] = self._waits.popleft()
            if self._orders is not None:
                self._orders.send(checkpoint=asdict(checkpoint), values=None)

    def _reported(self, stopping: Callable[[], bool]) -> Iterator[Score]:
        """Yield the scores from the evaluation ranks."""
        if self._orders is None or self._reports is None:
            return
        self._orders.send(complete=True)
        while not self._done:
            message = self._reports.next(SIGNAL_SECONDS)
            if message is not None:
                self._take(message)
            elif stopping():
                raise Interrupted("stopped by a signal while checkpoints were scored: mlperf-suite score goes on")
            yield from self.poll()

    def _take(self, message: Message) -> None:
        content = message.content
        if "number" in content:
            number, score = int(content["number"]), CheckpointScore(**content["score"])
            self._queue.note(number, score)
            self._known.append(self._score(number, score))
        self._done = self._done or "done" in content
        self.interrupted = self.interrupted or "interrupted" in content

    def _scored(self, scoring: CheckpointScoring, stopping: Callable[[], bool]) -> Iterator[Score]:
        """Build the evaluation on the training ranks and yield its scores."""
        scoring.prepare()
        scoring.open_data(self._root)

        def note(checkpoint: Checkpoint, score: CheckpointScore) -> None:
            self._queue.note(checkpoint.point.number, score)

        for checkpoint, score in scoring.scores(self._queue.next, note, stopping):
            if score is not None:
                yield self._score(checkpoint.point.number, score)

    def _score(self, number: int, score: CheckpointScore) -> Score:
        return score_of(self._queue.checkpoints[number], score, self._waited.get(number, 0.0))


def score_of(checkpoint: Checkpoint, score: CheckpointScore, waited_seconds: float = 0.0) -> Score:
    """Return the score of a checkpoint for the contract; ``waited_seconds``: time that training stood still for it."""
    point, between = checkpoint.point, (score.began_ms, score.ended_ms)
    assert point.time_ms is not None, "a checkpoint has a time"
    return Score(point.samples, score.values, point.time_ms, score.seconds, waited_seconds, point, between)


class OrderedCheckpoints:
    """Checkpoints to score, as rank 0 of the evaluation ranks receives them from training rank 0.

    Args:
        token: random name of the run's messages, from training rank 0.
        reached: returns whether the metrics of a checkpoint meet the targets.

    Attributes:
        signalled: returns whether a signal asks this rank to stop; training rank 0 is informed. May be replaced.
    """

    def __init__(self, token: str, config: EvaluationConfig, reached: Callable[[Mapping[str, float]], bool]) -> None:
        self._orders, self._reports = MessageReceiver(f"orders/{token}"), MessageSender(f"scores/{token}")
        self._first, self._reached = config.begins_with, reached
        self._checkpoints: dict[int, Checkpoint] = {}
        self._passed: dict[int, bool] = {}
        self._complete = self._done = self._reported = False
        self.signalled: Callable[[], bool] = never
        self.stopped_at: int | None = None

    def next(self) -> Checkpoint | None:
        """Wait for the next checkpoint to score; None once training rank 0 has sent the end of the run.

        Raises:
            RuntimeError: training rank 0 is gone.
        """
        for message in self._orders.collect():
            self._take(message)
        while self.stopped_at is None:
            if self.signalled() and not self._reported:
                self._reported = True
                self._reports.send(interrupted=True)
            number = next_to_score(self._checkpoints, self._passed, self._first, self._complete)
            if number is not None:
                return self._checkpoints[number]
            if self._complete and not self._done:
                self._done = True
                self._reports.send(done=True)
            message_or_none = self._orders.next(SIGNAL_SECONDS)
            if message_or_none is not None:
                self._take(message_or_none)
        return None

    def note(self, checkpoint: Checkpoint, score: CheckpointScore) -> None:
        """Send the score of a checkpoint to training rank 0."""
        self._passed[checkpoint.point.number] = self._reached(score.values)
        self._reports.send(number=checkpoint.point.number, score=asdict(score))

    def end(self) -> None:
        """Send the message that no more scores follow."""
        self._reports.end()

    def _take(self, message: Message) -> None:
        content = message.content
        if "checkpoint" in content:
            checkpoint = Checkpoint.decode(content["checkpoint"])
            self._checkpoints[checkpoint.point.number] = checkpoint
            if content["values"] is not None:
                self._passed[checkpoint.point.number] = self._reached(content["values"])
        self._complete = self._complete or "complete" in content
        if "stopped_at" in content:
            self.stopped_at = int(content["stopped_at"])
