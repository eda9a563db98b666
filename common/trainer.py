"""The life of a run, the same for every workload: from ``init_start`` to ``run_stop``."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import checkpoint
from common.checkpoint import Progress
from common.config import RunConfig, SessionConfig, workload_class
from common.data.prefetch import Prefetcher, side_stream
from common.data.source import Block, DataSource
from common.determinism import set_determinism
from common.distributed import job_store
from common.distributed.faults import GracefulStop, Heartbeat
from common.distributed.layout import Layout
from common.distributed.roles import Role
from common.distributed.startup import Place
from common.errors import ConfigError, DataError, Interrupted, SuiteError
from common.evaluation.points import EvaluationPoints
from common.evaluation.ways import way_to_evaluate
from common.graphs import StepRunner
from common.mlperf.admission import admit
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.seeds import draw_seed
from common.observe.metrics import MetricsWriter
from common.observe.nvml import GpuMeter, device_uuid, set_power_mode
from common.observe.profile import ProfileWindow
from common.observe.progress import Progress as ProgressBar
from common.reports import Finished, PendingReports

CATCHING_UP_SECONDS = 24 * 3600.0
EVALUATION_RANKS_SECONDS = 24 * 3600.0  # to wait for them: they watch their own progress
OVERFLOWS_TOLERATED = 50  # iterations in a row with gradients that are not finite


class Trainer:
    """One training run on this rank, one of those that train.

    Args:
        run: what the workload sees.
        session: folders, log, faults, observation.
        place: this process among the ranks; the process group exists when there is more than one.
        device: the device of this rank.
        began_ms: when the process began to build or run the model, milliseconds since the epoch; None for now.

    Raises:
        ConfigError: the ranks are not as many as the scale says, or the closed division forbids a value.
    """

    def __init__(
        self, run: RunConfig, session: SessionConfig, place: Place, device: torch.device, began_ms: int | None = None
    ) -> None:
        self.began_ms = time.time_ns() // 1_000_000 if began_ms is None else began_ms
        self.run, self.place, self.device = run, place, device
        self.role = Role.of(place, run.evaluation.ranks)
        if run.system.vboost is not None and device.type != "cuda":
            raise ConfigError(f"system.vboost={run.system.vboost}: this run uses no GPU")
        admission = admit(run, session)
        self.ruleset, self.rules = admission.ruleset, admission.rules
        self.logged, self.schedule = admission.hyperparameters, admission.schedule
        self.cls = workload_class(run.benchmark.name)
        self.progress = Progress()
        self.settings: dict[str, object] = {
            "benchmark": run.benchmark.name,
            "hparams.global_batch_size": run.global_batch,
            "micro_batch": run.micro_batch,
            "precision": run.precision,
            "benchmark.schedule": repr(replace(self.schedule, last=None)),  # a resumed run may go on longer
            "order of the data": self.cls.order_of_data(run),
        }
        self.resumed: dict[str, Any] | None = None
        if session.resume is not None:
            self.resumed = checkpoint.read(session.resume, self.settings, Layout(run.layout, self.role.rank, device))
        drawn = self.resumed["seed"] if self.resumed else session.seed if session.seed is not None else draw_seed()
        self.seed = int(job_store.from_rank_0("seed", str(drawn)))
        output = job_store.from_rank_0("output_dir", str(session.output_dir))
        self.session = replace(session, output_dir=Path(output))
        self.layout = Layout(run.layout, self.role.rank, device, self.seed)
        self.losses: list[tuple[int, float]] = []
        self.run_start_ms = self.run_stop_ms = 0
        self.status = "aborted"
        self.resumed_samples = int(self.resumed["progress"]["samples"]) if self.resumed else 0
        self._overflows_in_a_row = 0
        self._told_stop = self._told_reached = False
        self._epoch_began = 0.0
        self._shown = self._first_block = 0
        self.counted_samples = 0  # of training while the clock ran
        self._side = side_stream(device)
        self.overflows = 0

    def train(self) -> str:
        """Run from ``init_start`` to ``run_stop``; returns the status, ``success`` or ``aborted``.

        Raises:
            Interrupted: a signal asked to stop; the log is closed as aborted and a checkpoint written.
            SuiteError: something failed; the log is closed as aborted when the clock was running.
        """
        session, run = self.session, self.run
        try:
            session.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir={session.output_dir} cannot be made: {error.strerror}") from error
        with contextlib.ExitStack() as stack:
            self.heartbeat = stack.enter_context(Heartbeat(self.place, session.output_dir, session.timeout_seconds))
            self.bar = ProgressBar(self.place.rank)
            stack.callback(self.bar.close)
            self.metrics = MetricsWriter(
                session.output_dir / f"metrics_rank{self.place.rank}.jsonl",
                self.place.rank,
                session.output_dir / "tensorboard" if session.tensorboard else None,
            )
            stack.callback(self.metrics.close)
            self._open_meter(stack)
            self.profile = ProfileWindow.parse(session.profile, session.output_dir, self.place.rank)
            stack.callback(self.profile.close)
            self.log_path = self._log_path()
            log = RunLog(self.log_path, self.place.rank)
            log.before_line = self.bar.clear
            stack.callback(log.close)
            self.events = RunEvents(log, self.rules.progress_key, self._epoch_samples_in_the_log())
            resumed_from = str(session.resume) if session.resume else None
            gpus = self.device.type == "cuda"
            self.events.begin(run, session, self.ruleset, resumed_from, self.began_ms, gpus)
            self._initialise(stack)
            try:
                self._timed(stack)
            except BaseException as error:
                if self.run_start_ms:
                    with contextlib.suppress(OSError):  # a full disk must not hide what failed first
                        self._stop_clock("aborted")
                if isinstance(error, Interrupted):
                    self._dismiss(self.progress.step)
                raise
            self._dismiss(0)
        return self.status

    def _dismiss(self, stopped_at: int) -> None:
        with self.heartbeat.extended(EVALUATION_RANKS_SECONDS, "waiting for evaluation ranks to end"):
            self.evaluations.dismiss(stopped_at)

    def _open_meter(self, stack: contextlib.ExitStack) -> None:
        """Read this rank's GPU while the run lasts; change its power only when asked to."""
        uuid = device_uuid(self.device)
        if self.run.system.vboost is not None and uuid is not None:
            stack.callback(set_power_mode(self.run.system.vboost, uuid))
        self.meter = GpuMeter(uuid)
        stack.callback(self.meter.close)

    def _initialise(self, stack: contextlib.ExitStack) -> None:
        run = self.run
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            set_determinism(run.deterministic)
            torch.manual_seed(self.layout.generator("torch").initial_seed())
            self.workload = self.cls(run, self.layout)
            stack.callback(self.workload.close)
            self.step = self.workload.build_step()
            self.runner = StepRunner(self.step, self.workload.model, run.grad_accumulation_steps, run.cuda_graphs)
            stack.callback(self.runner.close)
            self.evaluations = way_to_evaluate(run, self.workload, self.layout)
            stack.callback(self.evaluations.close)
            self.runner.warm_up(self.workload.example_batches())
            self.workload.warm_up_reader()
            with self.runner.on_stream():
                self.evaluations.prepare(self.workload.weights)
            if self.resumed is not None:
                self.progress = checkpoint.restore(self.resumed, self.workload.model, self.step.updaters, self.layout)
                self._first_block = self.progress.block
                for remark in self.resumed["remarks"]:
                    self.bar.line(f"resume={self.session.resume}: {remark}")
        self.points = EvaluationPoints(
            self.evaluations, run.benchmark, self.events, self.metrics, self.bar, self.progress.history
        )
        tensors = self.cls.initialised_tensors(run)
        self.events.settings(self.seed, self.logged, self.workload.implementations(), tensors)
        self.events.initialised()
        with self.heartbeat.extended(60 * self.rules.init_minutes, "waiting for all ranks to be ready"):
            self._synchronise()

    def _timed(self, stack: contextlib.ExitStack) -> None:
        # Before the clock runs there is nothing to close or save: a signal ends the process at once.
        self.signals = stack.enter_context(GracefulStop())
        self.run_start_ms = time.time_ns() // 1_000_000
        self.events.run_start()
        job_store.from_rank_0("run_start", str(self.run_start_ms))
        with self.heartbeat.extended(30 * 60, "opening data"):
            root = self.session.data_dir
            self.evaluations.open_data(root)
            self.data: DataSource = self.workload.open_data(root)
        stack.callback(self.data.close)
        self._check_data()
        self.events.data_opened(self.data.train_samples, self.data.eval_samples)
        with self.runner.on_stream():
            for block in self.schedule.blocks(self.data.train_samples, self.run.global_batch):
                if block.index < self.progress.block:
                    continue
                if self._train_block(block) or self._evaluate(block):
                    self._stop_clock("success")
                    return
            self._stop_clock("success" if self._await_scores() else "aborted")

    def _train_block(self, block: Block) -> bool:
        """Train until the evaluation point after ``block``; whether the target was found to be reached meanwhile."""
        self._epoch, self._epoch_began = block.first_epoch, time.perf_counter()
        began, before = self._epoch_began, self.progress.samples
        self.events.block_start(block)
        if block.epochs:
            self.events.epoch_start(self._epoch)
        last = block.first_epoch + block.epochs - 1
        self.bar.block(block.index, block.samples, f"epochs {block.first_epoch}-{last}" if block.epochs else "samples")
        self._shown = max(self.progress.samples, block.start_sample)
        start = self.progress.position * self.run.grad_accumulation_steps
        batches = self.data.batches(block, start=start)
        # A reader that cannot start at a position reads up to it.
        catching_up = self.resumed is not None and block.index == self._first_block
        limit = CATCHING_UP_SECONDS if catching_up else self.session.timeout_seconds
        with self.heartbeat.extended(limit, "reading up to the position"):
            prefetcher = Prefetcher(batches, self.workload.prepare, self.run.grad_accumulation_steps, self._side)
        pending = PendingReports(self.step)
        while (micro_batches := prefetcher.take()) is not None:
            if self._settle(pending, self.session.steps_ahead - 1, block):
                break
            self._launch(micro_batches, prefetcher, pending)
        self._settle(pending, 0, block)
        if self._told_reached:
            return True
        if self._told_stop:
            self._save()
            raise Interrupted(f"stopped by a signal at step {self.progress.step}; the log is closed as aborted")
        self._finish_block(block)
        rate = (self.progress.samples - before) / (time.perf_counter() - began)
        self.events.block_stop(block, rate)
        return False

    def _launch(self, micro_batches: list[Any], prefetcher: Prefetcher, pending: PendingReports) -> None:
        if self._poll():
            self.step.reached.fill_(1)
        progress = self.progress
        number = progress.step + 1
        self.heartbeat.beat(number, "training")
        if self.signals.requested or self.evaluations.interrupted:
            self.step.stop.fill_(1)
        self.profile.before(number)
        wait, prefetcher.wait_seconds = prefetcher.wait_seconds, 0.0
        unknown = len(self.runner.uncaptured)
        report = self.runner(micro_batches)
        if len(self.runner.uncaptured) > unknown:
            self.bar.line(f"step {number}: batch key {micro_batches[0].key!r} was not captured and runs eagerly")
        samples = progress.samples + sum(batch.samples for batch in micro_batches)
        pending.push(number, samples, report, wait * 1e3)
        prefetcher.consumed()
        self.profile.after(number)
        self.progress = replace(progress, step=number, samples=samples, position=progress.position + 1)
        every = self.session.checkpoint_every
        if every and number % every == 0:
            self._save()

    def _settle(self, pending: PendingReports, limit: int, block: Block) -> bool:
        """Read reports until at most ``limit`` are outstanding; whether one has told all ranks to stop."""
        while len(pending) > limit:
            self._note(pending.pop(), block)
        return self._told_stop or self._told_reached

    def _note(self, done: Finished, block: Block) -> None:
        report = done.report
        self.heartbeat.device_step(done.step)
        self.overflows += report.overflow
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if report.overflow else 0
        if self._overflows_in_a_row >= OVERFLOWS_TOLERATED:
            raise SuiteError(
                f"the gradients were not finite in {self._overflows_in_a_row} steps in a row up to step {done.step}: "
                "the run diverged; look at the loss in the metrics, the learning rate and the precision"
            )
        loss = report.metrics.get("loss", float("nan"))
        self.losses.append((done.samples, loss))
        others = {name: value for name, value in report.metrics.items() if name != "loss"}
        self.metrics.write(
            done.step,
            done.samples,
            loss,
            step_ms=done.step_ms,
            data_wait_ms=done.data_wait_ms,
            overflow=float(report.overflow),
            **others,
            **self.meter.sample(),
        )
        self.bar.update(done.samples - self._shown, loss)
        self._shown = done.samples
        if block.epochs:
            self._note_epochs(done.samples, block)
        self._told_stop = self._told_stop or report.stop
        self._told_reached = self._told_reached or report.reached

    def _note_epochs(self, samples: int, block: Block) -> None:
        size = block.samples // block.epochs
        while samples >= self._epoch * size and self._epoch < block.first_epoch + block.epochs:
            now = time.perf_counter()
            self.events.epoch_stop(self._epoch, size / (now - self._epoch_began))
            self._epoch, self._epoch_began = self._epoch + 1, now
            if self._epoch < block.first_epoch + block.epochs:
                self.events.epoch_start(self._epoch)

    def _finish_block(self, block: Block) -> None:
        done = self.progress
        if done.samples < block.start_sample + block.samples:
            raise DataError(
                f"block {block.index} ended after {done.samples - block.start_sample} of {block.samples} samples: "
                "the reader delivered too few"
            )
        self.progress = replace(done, block=block.index + 1, position=0)

    def _evaluate(self, block: Block) -> bool:
        """Evaluate after ``block``; whether the target is reached, as all ranks know."""
        at, limit = self._progress_number(block), self.session.timeout_seconds
        with self.heartbeat.extended(limit, "evaluation"):
            weights = self.workload.weights()
        ranked = self.evaluations.ranked
        with self.heartbeat.extended(EVALUATION_RANKS_SECONDS if ranked else limit, "evaluation"):
            self.points.submit(weights, self.progress.samples, at)
            reached = self._poll()
        return reached and not ranked

    def _poll(self) -> bool:
        """Note the scores that have come; whether the target is reached, as far as this rank knows."""
        return self._conclude_points(self.points.poll())

    def _await_scores(self) -> bool:
        """Wait for the scores that have not come yet; whether the target is reached, as all ranks know."""
        if not self.evaluations.ranked:
            return False
        with self.heartbeat.extended(EVALUATION_RANKS_SECONDS, "waiting for scores"):
            reached = self._conclude_points(self.points.finish())
            told = job_store.from_rank_0("reached", str(int(reached)), timedelta(seconds=EVALUATION_RANKS_SECONDS))
        return told == "1"

    def _conclude_points(self, reached: bool) -> bool:
        if self.points.history is not self.progress.history:
            self.progress = replace(self.progress, history=self.points.history)
        if reached:
            self._stop_clock("success")
        return reached

    @property
    def _epoch_samples(self) -> int:
        return self.schedule.epoch_samples or self.run.benchmark.train_samples

    def _epoch_samples_in_the_log(self) -> int | None:
        """What the log multiplies epochs with; None where the ruleset counts as the schedule does."""
        converted = self.schedule.unit == "epoch" and self.rules.unit == "samples"
        return self._epoch_samples if converted else None

    def _progress_number(self, block: Block) -> int:
        return block.first_epoch + block.epochs - 1 if block.epochs else block.start_sample + block.samples

    def _stop_clock(self, status: str) -> None:
        """Log ``run_stop``, once: of the score that reached the target, or now."""
        if self.run_stop_ms:
            return
        done, passed = self.progress.samples, self.points.passed
        at = round(done / self._epoch_samples) if self.schedule.unit == "epoch" else done
        self.status, self.run_stop_ms = status, time.time_ns() // 1_000_000
        self.counted_samples = max(self._shown, self.resumed_samples) if self.evaluations.ranked else done
        if passed is not None:
            self.run_stop_ms, at = passed[0].time_ms, passed[1]
        self.events.run_stop(status, at, self.run_stop_ms)

    def _save(self) -> None:
        folder = self.session.output_dir / "checkpoints"
        with self.heartbeat.extended(self.session.timeout_seconds, "writing a checkpoint"):
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            place = checkpoint.save(
                folder, self.progress, self.seed, self.settings, self.workload.model, self.step.updaters, self.layout
            )
        if self.place.rank == 0:
            checkpoint.keep_newest(folder, self.session.keep_checkpoints)
        self.bar.line(f"checkpoint {place}")

    def _check_data(self) -> None:
        expected = self.run.benchmark
        found = (self.data.train_samples, self.data.eval_samples, self.data.stand_in)
        if found != (expected.train_samples, expected.eval_samples, expected.stand_in):
            raise DataError(
                f"{self.session.data_dir}: holds {found[0]} training and {found[1]} evaluation samples"
                f"{' of stand-in data' if found[2] else ''}, but the recipe is for {expected.train_samples} and "
                f"{expected.eval_samples} of {expected.data_set}; give the data_dir that belongs to this recipe"
            )

    def _log_path(self) -> Path:
        if self.resumed is None:
            return self.session.output_dir / "mlperf.log"
        step = self.resumed["progress"]["step"]
        return self.session.output_dir / f"mlperf_resumed_at_{step}.log"

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.evaluations.ranked:
            job_store.meet("initialised", timedelta(minutes=self.rules.init_minutes))
        elif self.place.world_size > 1:
            dist.barrier()
