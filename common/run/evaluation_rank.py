"""Main loop of a rank that only evaluates: build the workload, then evaluate until the training ranks end the run."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from common.distributed import job_store
from common.distributed.faults import GracefulStop
from common.distributed.weights import Arrived, Ended
from common.evaluation.checkpoint_queue import FOLDER
from common.evaluation.checkpoint_scoring import CheckpointScoring
from common.evaluation.offline import OrderedCheckpoints
from common.evaluation.serving import WeightEvaluation
from common.run.non_training_rank import OPENING_SECONDS, NonTrainingRank


class EvaluationRank(NonTrainingRank):
    """One rank of a run that evaluates all weights or checkpoints of the training ranks."""

    activity = "evaluates"
    passed = False

    def sizes(self) -> dict[str, int]:
        """Return the axes of ``evaluation.layout``."""
        return self.run.evaluation.layout

    def until_the_end(self, stack: contextlib.ExitStack) -> int:
        """Evaluate until the end is announced. Return the step at which a signal stopped training, or 0."""
        return self._score_checkpoints(stack) if self.run.evaluation.offline else self._evaluate_all(stack)

    def _evaluate_all(self, stack: contextlib.ExitStack) -> int:
        """Evaluate all weights from the training ranks. Return the step at which a signal stopped training, or 0."""
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            evaluation = self._prepare(stack)
            self.meet()
        job_store.from_rank_0("run_start", "")
        signals = stack.enter_context(GracefulStop())
        with self.heartbeat.extended(OPENING_SECONDS, "opening data"):
            evaluation.open_data(self.session.data_dir)
        return self._serve(evaluation, signals)

    def _score_checkpoints(self, stack: contextlib.ExitStack) -> int:
        """Score the checkpoints of the training ranks. Return the step at which a signal stopped training, or 0."""
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            workload = self.build(stack)
            token, first_rank = job_store.from_rank_0("offline", ""), self.role.first_rank
            folder = self.output_dir / FOLDER
            scoring = CheckpointScoring(workload, self.layout, folder, first_rank, self.heartbeat)
            stack.callback(scoring.close)
            scoring.prepare()
            benchmark, config = self.run.benchmark, self.run.evaluation
            ordered = OrderedCheckpoints(token, config, benchmark.reached) if scoring.leads else None
            self.meet()
        job_store.from_rank_0("run_start", "")
        signals = stack.enter_context(GracefulStop())
        with self.heartbeat.extended(OPENING_SECONDS, "opening data"):
            scoring.open_data(self.session.data_dir)
        if ordered is None:
            scores = scoring.scores(lambda: None, lambda checkpoint, score: None)
        else:
            ordered.signalled = lambda: signals.requested
            scores = scoring.scores(ordered.next, ordered.note)
        for index, (checkpoint, score) in enumerate(scores):
            self.heartbeat.beat(index + 1, "evaluation")
            seconds = {} if score is None else {"evaluation_ms": 1e3 * score.seconds}
            self.metrics.evaluated(index, checkpoint.point.samples, **seconds, **self.meter.sample())
            self.metrics.flush()
        stopped_at = 0
        if ordered is not None:
            stopped_at = ordered.stopped_at or 0
            ordered.end()
        return int(job_store.from_rank(first_rank, "stopped at", str(stopped_at)))

    def _prepare(self, stack: contextlib.ExitStack) -> WeightEvaluation:
        workload = self.build(stack)
        evaluation = workload.evaluation(self.layout)
        stack.callback(evaluation.close)
        evaluation.warm_up()
        return WeightEvaluation(self.run, workload, evaluation, timedelta(minutes=self.rules.init_minutes))

    def _serve(self, evaluation: WeightEvaluation, signals: GracefulStop) -> int:
        """Evaluate until the end is announced. Return the step at which a signal stopped training, or 0.

        After a signal, training still waits for the scores of all weights that it has sent, because a run resumed from
        its checkpoint does not evaluate them again.
        """
        while True:
            with self.heartbeat.idle("waiting for weights"):
                item = evaluation.receiver.take()
            if isinstance(item, Ended):
                break
            with self.heartbeat.extended(self.session.timeout_seconds, "evaluation"):
                if evaluation.reporter is not None and signals.requested:
                    evaluation.reporter.report(item.samples, None, 0.0)
                if self._any_passed():
                    evaluation.receiver.discard(item)
                else:
                    self._evaluate(evaluation, item)
        evaluation.end()
        return item.stopped_at

    def _any_passed(self) -> bool:
        """Return whether any score has reached the target. Rank 0 scores and broadcasts the answer. Collective."""
        if self.role.world_size == 1:
            return self.passed
        passed = torch.tensor(int(self.passed), dtype=torch.int32, device=self.device)
        dist.broadcast(passed, src=0)
        return bool(passed.item())

    def _evaluate(self, evaluation: WeightEvaluation, arrived: Arrived) -> None:
        self.heartbeat.beat(arrived.index + 1, "evaluation")
        began = time.perf_counter()
        values = evaluation.evaluate(arrived)
        self.passed = values is not None and self.run.benchmark.reached(values)
        self.metrics.evaluated(
            arrived.index,
            arrived.samples,
            evaluation_ms=(time.perf_counter() - began) * 1e3,
            transfer_ms=arrived.seconds * 1e3,
            **self.meter.sample(),
        )
        self.metrics.flush()
