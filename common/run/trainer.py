"""The main loop of a training run, the same for every workload: from ``init_start`` to ``run_stop``."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.config import loading
from common.config.schema import RunConfig, SessionConfig
from common.contract.evaluation import Point, Score
from common.contract.workload import Workload
from common.data.batches import Block, DataSource, GenerationSource, ReorderingSource, late_of
from common.data.prefetch import Prefetcher, side_stream
from common.distributed import job_store
from common.distributed.faults import GracefulStop, Heartbeat
from common.distributed.layout import Layout
from common.distributed.rank_info import RankInfo, Role
from common.distributed.shared_folder import make_output
from common.distributed.startup import set_determinism
from common.errors import DataError, Interrupted
from common.evaluation.modes import evaluation_mode
from common.evaluation.offline import OfflineEvaluation, OfflineRun
from common.evaluation.scorer_process import ScorerProcess
from common.launch.data_folder import require_samples
from common.mlperf.admission import admit
from common.mlperf.mllog import RunLog
from common.mlperf.seeds import draw_seed
from common.observe.metrics import MetricsWriter
from common.observe.nvml import open_meter
from common.observe.profile import ProfileWindow
from common.observe.progress_bar import ProgressBar
from common.observe.summary import Outcome
from common.optional_packages import broken_packages
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.run.play_rank import PlayRanks
from common.run.recording import Recording
from common.run.scoring import EvaluationPoints
from common.run.staging import order_of_data, staged, time_limit
from common.run.timed_run import Moment, TimedRun
from common.step.graphs import StepRunner, named
from common.step.train_step import StepsInFlight

CATCHING_UP_SECONDS = 24 * 3600.0
EVALUATION_RANKS_SECONDS = 24 * 3600.0  # limit for waiting for evaluation ranks, which watch their own progress
STOPPED = "stopped"
"""Value that rank 0 broadcasts if a signal has ended the wait for scores."""


class Trainer:
    """One training run on this rank. The constructor builds no model, opens no data or output and does not communicate.

    Args:
        rank_info: this process among the ranks. With several, the process group must exist.
        began_ms: time at which the process began to build or run the model, in milliseconds since the epoch. Default:
            now.
        scorer: scorer process; on rank 0 with background scoring, otherwise None.
        tree: the composed configuration, stored for later scoring of this run's checkpoints.

    Raises:
        ConfigError: the number of ranks differs from the scale, or the closed division forbids a value.
    """

    def __init__(
        self,
        workload_type: type[Workload],
        run: RunConfig,
        session: SessionConfig,
        rank_info: RankInfo,
        device: torch.device,
        began_ms: int | None = None,
        scorer: ScorerProcess | None = None,
        tree: Mapping[str, Any] | None = None,
    ) -> None:
        self.began_ms = time.time_ns() // 1_000_000 if began_ms is None else began_ms
        self.run, self.session, self.rank_info, self.device = run, session, rank_info, device
        self.scorer, self.tree = scorer, tree
        self.role = Role.of(rank_info, run.other_ranks)
        admission = admit(run, session)
        self.ruleset, self.rules = admission.ruleset, admission.rules
        self.logged, self.schedule = admission.hyperparameters, admission.schedule
        self.cls, self.play_ranks = workload_type, PlayRanks(run, rank_info)
        self.progress = Progress()
        self.settings: dict[str, object] = {
            "benchmark": run.benchmark.name,
            "hparams.global_batch_size": run.global_batch,
            "micro_batch": run.micro_batch,
            "precision": run.precision,
            "benchmark.schedule": repr(replace(self.schedule, last=None)),  # a resumed run may have a later end
            "order of the data": order_of_data(run, session),
        }
        self.configuration = loading.settings_by_key(run, session)
        self._stop_requested = self._target_reached = False

    def train(self) -> Outcome:
        """Train from ``init_start`` to ``run_stop``; return the outcome.

        Raises:
            CheckpointError: the checkpoint to resume from is unusable.
            Interrupted: a signal asked to stop; the log is closed as aborted, and a checkpoint is written if the ranks
                share ``output_dir``.
            ConfigError: ``output_dir`` cannot be created, or the ranks do not share it although a setting requires it.
            SuiteError: something failed; the log is closed as aborted if the clock was running.
        """
        self._agree()
        self._unshared = make_output(self.session.output_dir, self.run, self.session)
        with contextlib.ExitStack() as stack:
            log_path = self._open(stack)
            self._initialise(stack)
            try:
                self._timed(stack)
            except BaseException as error:
                if isinstance(self.evaluations, OfflineEvaluation) and self.evaluations.complete:
                    folder = shlex.quote(str(self.session.output_dir))
                    self.bar.line(f"the log is left open: mlperf-suite score {folder} completes it")
                elif self.clock.running:
                    with contextlib.suppress(OSError):  # a full disk must not hide the original error
                        self._stop_clock("aborted", None)
                if isinstance(error, Interrupted):
                    self._dismiss(self.progress.step)
                else:
                    with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be lost
                        self.play_ranks.run_ends(None)
                raise
            self._dismiss(0)
        return self._outcome(log_path)

    def _agree(self) -> None:
        """Read the checkpoint to resume from, and agree with the other ranks on seed and folder."""
        session, run = self.session, self.run
        self.resumed: dict[str, Any] | None = None
        if session.resume is not None:
            unseeded = Layout(run.layout, self.role.rank, self.device)
            self.resumed = checkpoint.read(session.resume, self.settings, unseeded, self.configuration, session.seed)
        drawn = self.resumed["seed"] if self.resumed else session.seed if session.seed is not None else draw_seed()
        self.seed = int(job_store.from_rank_0("seed", str(drawn)))
        self.session = replace(session, output_dir=Path(job_store.from_rank_0("output_dir", str(session.output_dir))))
        self.layout = Layout(run.layout, self.role.rank, self.device, self.seed, ctas=run.system.network.ctas.by_axis())
        self.resumed_samples = int(self.resumed["progress"]["counted"]) if self.resumed else 0

    def _open(self, stack: contextlib.ExitStack) -> Path:
        """Open log, metrics and monitoring, and log ``init_start``; return the log's path."""
        session, run, rank = self.session, self.run, self.rank_info.rank
        self.heartbeat = stack.enter_context(Heartbeat(self.rank_info, session.output_dir, session.timeout_seconds))
        self.bar = ProgressBar(rank)
        stack.callback(self.bar.close)
        if self._unshared:
            self.bar.line(
                f"{self._unshared}: the others keep their metrics there, and no checkpoint is written when the run is "
                "interrupted"
            )
        self.metrics = MetricsWriter(
            session.output_dir / f"metrics_rank{rank}.jsonl",
            rank,
            session.output_dir / "tensorboard" if session.tensorboard else None,
        )
        stack.callback(self.metrics.close)
        self.meter = open_meter(self.device, run.system.vboost, stack)
        self.recording = Recording(self.metrics, self.meter, self.bar)
        self.profile = ProfileWindow.parse(session.profile, session.output_dir, rank)
        if self.profile is not None:
            stack.callback(self.profile.close)
        step = self.resumed["progress"]["step"] if self.resumed else None
        self.log_name = f"mlperf_resumed_at_{step}.log" if self.resumed else "mlperf.log"
        log = RunLog(session.output_dir / self.log_name, rank)
        log.before_line = self.bar.clear
        stack.callback(log.close)
        tokens = run.declaration.sample_tokens
        self.clock = TimedRun(log, self.rules, self.schedule, run.train_samples, run.global_batch, tokens)
        resumed_from = str(session.resume) if session.resume else None
        self.clock.events.begin(run, session, self.rules, resumed_from, self.began_ms, self.device.type == "cuda")
        return session.output_dir / self.log_name

    def _outcome(self, log_path: Path) -> Outcome:
        scores = self.points.scores
        return Outcome(
            status=self.clock.status,
            ruleset=self.ruleset,
            seed=self.seed,
            resumed=self.resumed is not None,
            seconds=(self.clock.stop_ms - self.clock.start_ms) / 1000,
            samples=self.clock.samples - self.resumed_samples,
            steps=self.progress.step,
            overflows=self.recording.overflows,
            losses=tuple(self.recording.losses),
            history=self.progress.history,
            evaluations=len(scores),
            evaluation_seconds=sum(score.seconds for score in scores),
            hidden_seconds=sum(score.hidden_seconds for score in scores),
            energy_joules=self.meter.energy_joules(),
            log=log_path,
            output_dir=self.session.output_dir,
        )

    def _dismiss(self, stopped_at: int) -> None:
        with self.heartbeat.extended(EVALUATION_RANKS_SECONDS, "waiting for evaluation ranks to end"):
            self.evaluations.dismiss(stopped_at)
        self.play_ranks.run_ends(stopped_at)

    def _initialise(self, stack: contextlib.ExitStack) -> None:
        run, events = self.run, self.clock.events
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            set_determinism(run.deterministic)
            torch.manual_seed(self.layout.generator("torch").initial_seed())
            self.workload = self.cls(run, self.layout)
            stack.callback(self.workload.close)
            self.step = self.workload.build_step()
            self.runner = StepRunner(self.step, self.workload.model, run.grad_accumulation_steps, run.cuda_graphs)
            stack.callback(self.runner.close)
            self.evaluations = evaluation_mode(run, self.workload, self.layout, self.scorer, self._offline_run())
            stack.callback(self.evaluations.close)
            self.runner.warm_up(self.workload.example_batches())
            self.workload.warm_up_reader()
            with self.runner.on_stream():
                self.evaluations.prepare(self.workload.weights)
            if self.resumed is not None:
                self.progress = checkpoint.restore(
                    self.resumed, self.workload.model, self.step.updaters, self.layout, **self._of_the_model()
                )
                for remark in self.resumed["remarks"]:
                    self.bar.line(f"resume={self.session.resume}: {remark}")
            else:
                self.workload.load_start()
            self.workload.scratch(self.session.output_dir, self.progress.block if self.resumed else None)
        self._first_block, self.recording.counted = self.progress.block, self.progress.counted
        self.points = EvaluationPoints(
            self.evaluations, run.benchmark, events, self.metrics, self.bar, self.progress.history
        )
        self._side = side_stream(self.device)
        self._rest()
        for reason in broken_packages():
            self.bar.line(reason)
        events.settings(self.seed, self.logged, self.workload.implementations(), run.declaration.initialised_tensors)
        if not self.rules.staging_timed:
            self._stage(stack)
        events.initialised()
        with self.heartbeat.extended(60 * self.rules.init_minutes, "waiting for all ranks to be ready"):
            self._synchronise()

    def _stage(self, stack: contextlib.ExitStack) -> None:
        """Copy the data to local disks if the run stages them, and set the folder that training reads."""
        with self.heartbeat.extended(time_limit(self.rules).total_seconds(), "staging the data"):
            self._data_dir = staged(self.workload, self.session, self.rank_info, self.rules, self.clock.events, stack)

    def _timed(self, stack: contextlib.ExitStack) -> None:
        # Before the clock runs there is nothing to close or save: a signal may end the process at once.
        self.signals = stack.enter_context(GracefulStop())
        self.clock.start(self.progress.step)
        job_store.from_rank_0("run_start", str(self.clock.start_ms))
        if self.rules.staging_timed:
            self._stage(stack)
        with self.heartbeat.extended(30 * 60, "opening data"), self.runner.on_stream():
            self.evaluations.open_data(self._data_dir)
            self.data: DataSource = self.workload.open_data(self._data_dir)
        stack.callback(self.data.close)
        if self.resumed is not None and isinstance(self.data, ReorderingSource):
            self.data.resume(self.resumed["late"])
        if isinstance(self.data, GenerationSource):
            self.data.watch(self._waits_for_games, lambda: self.signals.requested or self.points.passed is not None)
        data = self.data
        require_samples(self.run, self.session.data_dir, data.train_samples, data.eval_samples, data.synthetic)
        self.clock.events.data_opened(data.train_samples, data.eval_samples)
        with self.heartbeat.extended(30 * 60, "capturing the shapes of the data"):
            self.runner.warm_up(self.workload.examples_of_data(), iterations=1)  # the step is warm already
        with self.runner.on_stream():
            blocks = self.schedule.blocks(self.data.train_samples, self.run.global_batch)
            for block, following in itertools.pairwise(itertools.chain(blocks, (None,))):
                if block is None or block.index < self.progress.block:
                    continue
                if self._train_block(block, last=following is None) or self._evaluate(block):
                    break
            self._conclude()

    def _conclude(self) -> None:
        """After training, wait for the scores that decide, and stop the clock."""
        self.play_ranks.training_ends()
        if self.evaluations.offline and not self.run.evaluation.ranks:
            self.runner.close()  # the evaluation needs the graphs' memory
        # With inline evaluation, all ranks know the scores. After a score that reached the target, no other counts.
        reached = self._await_scores() if self.evaluations.later else self.points.passed is not None
        if self.run.evaluation.by_command:
            self.clock.leave(self.recording.counted)
        else:
            self._stop_clock("success" if reached else "aborted", self.points.ending())

    def _train_block(self, block: Block, last: bool) -> bool:
        """Train until the evaluation point after ``block``. Return whether the target was reached meanwhile.

        If other ranks evaluate, return without waiting for the device; the next block's steps are queued behind.
        """
        before, ending = self.progress.samples, False
        self.clock.after(self.progress.step, lambda at: self._block_begins(block, before, at))
        try:
            self._read(block)
        except Interrupted:  # while the block's games were played
            passed = job_store.from_rank_0("whether a generation passed", str(self.points.passed is not None))
            self._target_reached = passed == "True"
            return self._stopped_early()
        while (micro_batches := self.prefetcher.take()) is not None:
            if ending := self._settle(self.session.steps_ahead - 1):
                break
            self._launch(micro_batches)
            every = self.session.checkpoint_every
            if every and self.progress.step % every == 0:
                if ending := self._settle(0):  # so that the checkpoint counts all samples
                    break
                self._save()
        if ending or last or not self.evaluations.elsewhere or not block.samples:
            if self._settle(0):
                return self._stopped_early()
            self._rest()
        self._finish_block(block)
        self.clock.after(self.progress.step, lambda at: self.clock.block_ends(self.recording.counted, at))
        return False

    def _rest(self) -> None:
        """Create an empty queue and prefetcher, after all steps are finished; later steps need nothing of them."""
        self.pending = StepsInFlight(self.step)
        self.prefetcher = Prefetcher(self.workload.prepare, self.run.grad_accumulation_steps, self._side)

    def _block_begins(self, block: Block, samples: int, at: Moment) -> None:
        self.clock.block_begins(block, samples, self.recording.counted, at)
        self.recording.block_begins(block, samples)

    def _read(self, block: Block) -> None:
        """Give the prefetcher the batches of ``block`` from the run's position on."""
        batches = self.data.batches(block, start=self.progress.position * self.run.grad_accumulation_steps)
        # A reader that cannot seek reads all data up to the position. One of generations (without samples) can seek.
        catching_up = self.resumed is not None and block.index == self._first_block and block.samples
        limit = CATCHING_UP_SECONDS if catching_up else self.session.timeout_seconds
        with self.heartbeat.extended(limit, "reading up to the position"):
            self.prefetcher.begin(batches)

    def _waits_for_games(self) -> None:
        """Give the checkpoints that are complete to the evaluation ranks, and take their scores."""
        self.heartbeat.beat(self.progress.step, "waiting for games")
        if self.evaluations.later:
            self._poll()

    def _launch(self, micro_batches: list[Any]) -> None:
        if self.evaluations.later and self._poll():
            self.step.reached.fill_(1)
        progress, prefetcher = self.progress, self.prefetcher
        number = progress.step + 1
        self.heartbeat.beat(number, "training")
        if self.signals.requested or self.evaluations.interrupted:
            self.step.stop.fill_(1)
        if self.profile is not None:
            self.profile.before(number)
        wait, prefetcher.wait_seconds = prefetcher.wait_seconds, 0.0
        unknown = len(self.runner.uncaptured)
        result = self.runner(micro_batches)
        if len(self.runner.uncaptured) > unknown:
            self.bar.line(f"step {number}: {named(list(self.runner.uncaptured)[-1])} not captured, runs eagerly")
        samples = progress.samples + sum(batch.samples for batch in micro_batches)
        self.pending.push(number, samples, result, wait * 1e3)
        prefetcher.consumed()
        if self.profile is not None:
            self.profile.after(number)
        self.progress = replace(progress, step=number, samples=samples, position=progress.position + 1)

    def _settle(self, limit: int) -> bool:
        """Read results until at most ``limit`` steps are in flight. Return whether one ends the run, on all ranks."""
        while len(self.pending) > limit:
            done = self.pending.pop()
            self.heartbeat.device_step(done.step)
            self.recording.step(done)
            self.clock.step_done(done.step, done.samples, done.ended)
            self._stop_requested = self._stop_requested or done.result.stop
            self._target_reached = self._target_reached or done.result.reached
        return self._stop_requested or self._target_reached

    def _stopped_early(self) -> bool:
        """End the run as a step's result asks. Return True if the target is reached.

        Raises:
            Interrupted: a signal asked to stop. If the ranks share the folder, a checkpoint is written, with the scores
                of all earlier evaluations.
        """
        if self._target_reached:
            return True
        self._save_if_shared()  # before the wait for scores, because the launcher may kill the run during the wait
        if self.evaluations.later and not self.evaluations.offline:
            known = len(self.progress.history)
            if self._await_scores():
                return True
            if job_store.from_rank_0("scores since the checkpoint", str(len(self.progress.history) - known)) != "0":
                self._save_if_shared()
        raise Interrupted(f"stopped by a signal at step {self.progress.step}; the log is closed as aborted")

    def _finish_block(self, block: Block) -> None:
        done = self.progress
        if done.samples < block.start_sample + block.samples:
            raise DataError(
                f"block {block.index} ended after {done.samples - block.start_sample} of {block.samples} samples: "
                "the reader delivered too few"
            )
        self.progress = replace(done, block=block.index + 1, position=0)

    def _evaluate(self, block: Block) -> bool:
        """Evaluate after ``block``. Return whether the target is reached, if all ranks already know the score."""
        limit = self.session.timeout_seconds
        with self.heartbeat.extended(limit, "evaluation"):
            weights = self.clock.handed_over(self.data, block, self.workload.weights())
        self.recording.self_play(self.data, block.first_epoch)
        # If an earlier evaluation may still be running, allow for its time, too.
        longest = (EVALUATION_RANKS_SECONDS if self.evaluations.elsewhere else limit) + limit * self.evaluations.later
        with self.heartbeat.extended(longest, "evaluation"):
            step, samples = self.progress.step, self.progress.samples
            self.clock.after(step, lambda at: self._evaluation_begins(block, step, samples, at))
            self.points.submit(weights, self.progress.samples)
            reached = self._poll()
        return reached and not self.evaluations.later

    def _evaluation_begins(self, block: Block, step: int, samples: int, at: Moment) -> None:
        counted = self.recording.counted
        number = self.clock.evaluation_point(block, counted)
        self.points.begin(Point(block.index + 1, number, step, samples, counted, at.time_ms))

    def _poll(self) -> bool:
        """Record the scores that have arrived. Return whether the target is reached as far as this rank knows."""
        return self._conclude_points(self.points.poll())

    def _await_scores(self) -> bool:
        """Wait for the pending scores. Return whether the target is reached; all ranks get the same answer."""
        longest = timedelta(seconds=EVALUATION_RANKS_SECONDS)
        with self.heartbeat.extended(EVALUATION_RANKS_SECONDS, "waiting for scores"):
            try:
                reached = self._conclude_points(self.points.finish(lambda: self.signals.requested))
            except Interrupted:
                job_store.from_rank_0("reached", STOPPED, longest)
                raise
            agreed = job_store.from_rank_0("reached", str(int(reached)), longest)
        if agreed == STOPPED:
            raise Interrupted("stopped by a signal while checkpoints were scored: mlperf-suite score goes on")
        return agreed == "1"

    def _conclude_points(self, reached: bool) -> bool:
        if self.points.history is not self.progress.history:
            self.progress = replace(self.progress, history=self.points.history)
        if reached and not self.evaluations.offline:  # offline, an earlier checkpoint may still reach the target
            self._stop_clock("success", self.points.passed)
        return reached

    def _stop_clock(self, status: str, ending: tuple[Score, int] | None) -> None:
        """Log ``run_stop`` once, with the time of the score that ends the run, or else the current time."""
        if self.clock.running:
            self.points.log_checkpoints()
        self.clock.stop(status, self.progress.samples, self.recording.counted, ending)

    def _offline_run(self) -> OfflineRun:
        """Return the description of this run for offline scoring."""
        step = None if self.resumed is None else int(self.resumed["progress"]["step"])
        return OfflineRun.of(self.run, self.session, self.tree or {}, self.seed, self.log_name, step, self.bar.line)

    def _save_if_shared(self) -> None:
        """Write a checkpoint outside the configured interval, unless the ranks do not share the folder."""
        if self._unshared:
            self.bar.line(f"no checkpoint of step {self.progress.step} was written: {self._unshared}")
        else:
            self._save()

    def _save(self) -> None:
        folder = self.session.output_dir / "checkpoints"
        progress = replace(self.progress, counted=self.recording.counted, unscored=self.points.unscored)
        with self.heartbeat.extended(self.session.timeout_seconds, "writing a checkpoint"):
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if isinstance(self.evaluations, OfflineEvaluation):
                self.evaluations.wait_for_disk()  # a resumed run does not write these evaluation checkpoints again
            saved_to = checkpoint.save(
                folder, progress, self.seed, self.settings, self.workload.model, self.step.updaters, self.layout,
                configuration=self.configuration, **self._of_the_model(),
                late=late_of(self.data, progress.step * self.run.grad_accumulation_steps),
            )  # fmt: skip
        if self.rank_info.rank == 0:
            checkpoint.keep_newest(folder, self.session.keep_checkpoints)
        self.bar.line(f"checkpoint {saved_to}")

    def _of_the_model(self) -> dict[str, Any]:
        """Return arguments for checkpoints that describe the model."""
        return {"base": self.workload.base_digest(), "splits": self.workload.tensor_splits()}

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.evaluations.elsewhere or self.run.selfplay.ranks:
            job_store.meet("initialised", timedelta(minutes=self.rules.init_minutes))
        elif self.rank_info.world_size > 1:
            dist.barrier()
