"""Main loop of a rank that only evaluates: build the workload, then evaluate until the training ranks end the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.config.schema import RunConfig, SessionConfig
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.faults import GracefulStop, Heartbeat
from common.distributed.layout import Layout
from common.distributed.rank_info import RankInfo, Role
from common.distributed.shared_folder import make_output
from common.distributed.startup import set_determinism
from common.distributed.weights import Arrived, Ended
from common.errors import Interrupted, SuiteError
from common.evaluation.checkpoint_queue import FOLDER
from common.evaluation.checkpoint_scoring import CheckpointScoring
from common.evaluation.offline import OrderedCheckpoints
from common.evaluation.serving import WeightEvaluation
from common.mlperf.admission import admit
from common.observe.metrics import MetricsWriter
from common.observe.nvml import GpuMeter, device_uuid

OPENING_SECONDS = 30 * 60


class EvaluationRank:
    """One evaluation rank of a run. The training ranks run a Trainer each. The constructor does not communicate.

    Raises:
        ConfigError: the closed division forbids a configuration value.
    """

    def __init__(
        self,
        workload_type: type[Workload],
        run: RunConfig,
        session: SessionConfig,
        rank_info: RankInfo,
        device: torch.device,
    ) -> None:
        self.workload_type = workload_type
        self.run, self.session, self.rank_info, self.device = run, session, rank_info, device
        self.role = Role.of(rank_info, run.evaluation.ranks)
        self.rules = admit(run, session).rules
        self.passed = False

    def evaluate(self) -> None:
        """Evaluate all weights or checkpoints until the training ranks announce the end.

        Raises:
            Interrupted: a signal stopped the training ranks.
            SuiteError: this rank failed; the message names it.
        """
        try:
            with contextlib.ExitStack() as stack:
                self._enter(stack)
        except Interrupted:
            raise
        except SuiteError as error:
            raise type(error)(f"rank {self.rank_info.rank}, which evaluates: {error}") from error

    def _agree(self) -> None:
        """Get seed and folder from the training ranks, and report whether this rank sees the folder."""
        seed, output = job_store.from_rank_0("seed", ""), job_store.from_rank_0("output_dir", "")
        self.output_dir = Path(output)
        make_output(self.output_dir, self.run, self.session)
        self.layout = Layout(
            self.run.evaluation.layout, self.role.rank, self.device, int(seed), self.role.name,
            self.run.system.network.ctas.by_axis(),
        )  # fmt: skip

    def _enter(self, stack: contextlib.ExitStack) -> None:
        self._agree()
        session, rank = self.session, self.rank_info.rank
        self.heartbeat = stack.enter_context(
            Heartbeat(self.rank_info, self.output_dir, session.timeout_seconds, role=self.role.name)
        )
        self.metrics = MetricsWriter(self.output_dir / f"metrics_rank{rank}.jsonl", rank)
        stack.callback(self.metrics.close)
        self.meter = GpuMeter(device_uuid(self.device))
        stack.callback(self.meter.close)
        with evaluation_stream(self.device):
            stopped_at = self._score_checkpoints(stack) if self.run.evaluation.offline else self._evaluate_all(stack)
        if stopped_at:
            raise Interrupted(f"stopped by a signal at step {stopped_at}; the log is closed as aborted")

    def _evaluate_all(self, stack: contextlib.ExitStack) -> int:
        """Evaluate all weights from the training ranks. Return the step at which a signal stopped training, or 0."""
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            evaluation = self._prepare(stack)
            self._meet()
        job_store.from_rank_0("run_start", "")
        signals = stack.enter_context(GracefulStop())
        with self.heartbeat.extended(OPENING_SECONDS, "opening data"):
            evaluation.open_data(self.session.data_dir)
        return self._serve(evaluation, signals)

    def _score_checkpoints(self, stack: contextlib.ExitStack) -> int:
        """Score the checkpoints of the training ranks. Return the step at which a signal stopped training, or 0."""
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            workload = self._build(stack)
            token, first_rank = job_store.from_rank_0("offline", ""), self.role.first_rank
            folder = self.output_dir / FOLDER
            scoring = CheckpointScoring(workload, self.layout, folder, first_rank, self.heartbeat)
            stack.callback(scoring.close)
            scoring.prepare()
            benchmark, config = self.run.benchmark, self.run.evaluation
            ordered = OrderedCheckpoints(token, config, benchmark.reached) if scoring.leads else None
            self._meet()
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

    def _meet(self) -> None:
        job_store.meet("initialised", timedelta(minutes=self.rules.init_minutes))

    def _build(self, stack: contextlib.ExitStack) -> Workload:
        set_determinism(self.run.deterministic)
        torch.manual_seed(self.layout.generator("torch").initial_seed())
        workload = self.workload_type(self.run, self.layout)
        stack.callback(workload.close)
        return workload

    def _prepare(self, stack: contextlib.ExitStack) -> WeightEvaluation:
        workload = self._build(stack)
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


@contextlib.contextmanager
def evaluation_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream current, because graphs cannot be captured on the default one; do nothing without a GPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
