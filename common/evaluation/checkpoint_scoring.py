"""Scoring of checkpoints, one after the other, on training ranks or other ranks, during or after the training."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from common.contract.evaluation import Evaluation, Predictions, Weights, never
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.faults import Heartbeat, PeerFailed
from common.distributed.layout import Layout
from common.distributed.tensor_split import own_parts
from common.errors import Interrupted
from common.evaluation.checkpoint_queue import Checkpoint, CheckpointScore
from common.formats.safetensors_file import read_tensors

FOR_EVER = timedelta(days=30)
"""Time limit of the wait for the next checkpoint, which may be hours away. If a rank fails, the wait ends early."""
LONGEST_SECONDS = 24 * 3600.0
"""Time limit of one evaluation, in seconds. On few ranks it may take hours."""
_FAILED, _STOPPED, _NO_MORE = "failed", "stopped", "no more"


class CheckpointScoring:
    """Runs a workload's evaluation on checkpoint files that all ranks of a layout can read.

    Rank 0 of the layout selects the checkpoints, scores, and informs the other ranks through the job's store.

    Args:
        workload: workload built over the same layout.
        first_rank: rank in the job of the layout's rank 0.
        heartbeat: heartbeat of this rank, which must tolerate long waits and evaluations; None without one.
    """

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        folder: Path,
        first_rank: int = 0,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._workload, self._layout, self._folder = workload, layout, folder
        self._first_rank, self._heartbeat = first_rank, heartbeat
        self._evaluation: Evaluation | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank selects checkpoints and scores."""
        return self._layout.rank == 0

    def prepare(self) -> None:
        """Build the evaluation and warm it up on synthetic data. Later calls do nothing."""
        if self._evaluation is None:
            self._evaluation = self._workload.evaluation(self._layout)
            self._evaluation.warm_up()
            if self.leads:
                self._evaluation.scorer.warm_up()

    def open_data(self, root: Path) -> None:
        """Open the evaluation data and, on rank 0, the ground truth."""
        assert self._evaluation is not None, "the evaluation is built first"
        self._evaluation.open_data(root)
        if self.leads:
            self._evaluation.scorer.open_data(root)

    def close(self) -> None:
        """Close the evaluation data."""
        if self._evaluation is not None:
            self._evaluation.close()

    def scores(
        self,
        choose: Callable[[], Checkpoint | None],
        note: Callable[[Checkpoint, CheckpointScore], None],
        stopping: Callable[[], bool] = never,
    ) -> Iterator[tuple[Checkpoint, CheckpointScore | None]]:
        """Score checkpoints until ``choose`` returns None; yield each, with its score on rank 0 only. Collective.

        Args:
            choose: returns the next checkpoint, on rank 0, possibly after waiting; None for the end.
            note: receives each score on rank 0, before the next checkpoint is chosen.
            stopping: returns whether a signal asks rank 0 to stop; checked between checkpoints.

        Raises:
            Interrupted: a signal asked to stop.
            PeerFailed: rank 0 could not score or not choose.
            CheckpointError: a checkpoint is missing or cannot be read.
        """
        current: Checkpoint | None = None
        predictions: Predictions | None = None
        began, began_ms = 0.0, 0
        while True:
            message, score = _FAILED, None
            try:
                if self.leads:
                    if current is not None:
                        values = self._judge(predictions)
                        now = time.time_ns() // 1_000_000
                        score = CheckpointScore(current.file, values, began_ms, now, time.perf_counter() - began)
                        note(current, score)
                    with self._waiting():
                        chosen = None if stopping() else choose()
                    message = (_STOPPED if stopping() else _NO_MORE) if chosen is None else json.dumps(asdict(chosen))
            finally:
                with self._waiting():
                    message = job_store.from_rank(self._first_rank, "checkpoint to score", message, FOR_EVER)
            if message == _FAILED:
                raise PeerFailed("rank 0 could not score the checkpoint")
            if current is not None:
                yield current, score
            if message == _STOPPED:
                raise Interrupted("stopped by a signal while checkpoints were scored: mlperf-suite score goes on")
            if message == _NO_MORE:
                return
            current = Checkpoint.decode(json.loads(message))
            began, began_ms = time.perf_counter(), time.time_ns() // 1_000_000
            with self._working():
                predictions = self._predict(current.require(self._folder))

    def _predict(self, path: Path) -> Predictions | None:
        assert self._evaluation is not None, "the evaluation is built first"
        tensors = read_tensors(path, self._layout.device)
        return self._evaluation.predict(Weights(own_parts(tensors, self._workload.tensor_splits())))

    def _judge(self, predictions: Predictions | None) -> dict[str, float]:
        assert self._evaluation is not None, "the evaluation is built first"
        assert predictions is not None, "rank 0 predicts"
        return self._evaluation.scorer.score(predictions)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.idle("waiting for checkpoints")

    def _working(self) -> contextlib.AbstractContextManager[None]:
        if self._heartbeat is None:
            return contextlib.nullcontext()
        return self._heartbeat.extended(LONGEST_SECONDS, "evaluation of a checkpoint")
