"""The life of a run, the same for every workload: from ``init_start`` to ``run_stop``."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import checkpoint
from common.checkpoint import Progress
from common.config import RunConfig, SessionConfig, workload_class
from common.data.prefetch import Prefetcher, side_stream
from common.data.source import Block, DataSource
from common.distributed.faults import GracefulStop, Heartbeat
from common.distributed.layout import Layout
from common.distributed.startup import Place
from common.errors import ConfigError, DataError, Interrupted, SuiteError
from common.evaluation.base import Score
from common.evaluation.inline import InlineEvaluation
from common.graphs import StepRunner
from common.mlperf.constraints import check_hyperparameters
from common.mlperf.events import RunEvents, hyperparameters
from common.mlperf.fixed import check_fixed
from common.mlperf.mllog import RunLog
from common.mlperf.rules import newest_ruleset, rules_for
from common.mlperf.schedules import SCHEDULES
from common.mlperf.seeds import draw_seed
from common.observe.metrics import MetricsWriter
from common.observe.profile import ProfileWindow
from common.observe.progress import Progress as ProgressBar
from common.reports import Finished, PendingReports

CATCHING_UP_SECONDS = 24 * 3600.0
OVERFLOWS_TOLERATED = 50  # iterations in a row with gradients that are not finite


class Trainer:
    """One training run on this rank.

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
        self.ruleset = session.ruleset or newest_ruleset(run.benchmark.name)
        self.rules = rules_for(run.benchmark.name, self.ruleset)
        self.cls = workload_class(run.benchmark.name)
        self.logged = hyperparameters(run, self.cls.derived_values(run))
        if session.submission.division == "closed":
            check_hyperparameters(run.benchmark.name, self.ruleset, self.logged)
            check_fixed(run.benchmark, self.cls.closed_division(run))
        try:
            self.schedule = SCHEDULES[run.benchmark.name](run.global_batch, **run.benchmark.schedule)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"benchmark.schedule={run.benchmark.schedule}: {error}") from error
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
            self.resumed = checkpoint.read(session.resume, self.settings, Layout(run.layout, place.rank, device))
        drawn = self.resumed["seed"] if self.resumed else session.seed if session.seed is not None else draw_seed()
        self.seed, output = _from_rank_0((drawn, str(session.output_dir)), place)
        self.session = replace(session, output_dir=Path(output))
        self.layout = Layout(run.layout, place.rank, device, self.seed)
        self.losses: list[tuple[int, float]] = []
        self.run_start_ms = self.run_stop_ms = 0
        self.status = "aborted"
        self.resumed_samples = int(self.resumed["progress"]["samples"]) if self.resumed else 0
        self._overflows_in_a_row = 0
        self._epoch_began = 0.0
        self._shown = self._first_block = 0
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
            self.profile = ProfileWindow.parse(session.profile, session.output_dir, self.place.rank)
            stack.callback(self.profile.close)
            self.log_path = self._log_path()
            log = RunLog(self.log_path, self.place.rank)
            log.before_line = self.bar.clear
            stack.callback(log.close)
            self.events = RunEvents(log, self.rules.progress_key)
            resumed_from = str(session.resume) if session.resume else None
            self.events.begin(run, session, self.ruleset, resumed_from, self.began_ms)
            self._initialise(stack)
            try:
                self._timed(stack)
            except BaseException:
                if self.run_start_ms and not self.run_stop_ms:
                    with contextlib.suppress(OSError):  # a full disk must not hide what failed first
                        self._stop_clock("aborted", None)
                raise
        return self.status

    def _initialise(self, stack: contextlib.ExitStack) -> None:
        run = self.run
        with self.heartbeat.extended(30 * 60, "initialisation"):
            _set_determinism(run.deterministic)
            torch.manual_seed(self.layout.generator("torch").initial_seed())
            self.workload = self.cls(run, self.layout)
            stack.callback(self.workload.close)
            self.step = self.workload.build_step()
            self.runner = StepRunner(
                self.step, self.workload.model, run.grad_accumulation_steps, self.session.cuda_graphs
            )
            self.evaluation = InlineEvaluation(self.workload.evaluation(self.layout))
            stack.callback(self.evaluation.close)
            self.runner.warm_up(self.workload.example_batches())
            self.workload.warm_up_reader()
            with self.runner.on_stream():
                self.evaluation.warm_up()
            if self.resumed is not None:
                self.progress = checkpoint.restore(self.resumed, self.workload.model, self.step.updaters, self.layout)
                self._first_block = self.progress.block
        self.events.settings(self.seed, self.logged, self.workload.implementations())
        self.events.initialised()
        self._synchronise()

    def _timed(self, stack: contextlib.ExitStack) -> None:
        # Before the clock runs there is nothing to close or save: a signal ends the process at once.
        self.signals = stack.enter_context(GracefulStop())
        self.run_start_ms = time.time_ns() // 1_000_000
        self.events.run_start()
        with self.heartbeat.extended(30 * 60, "opening data"):
            root = self.session.data_dir
            self.evaluation.open_data(root)
            self.data: DataSource = self.workload.open_data(root)
        stack.callback(self.data.close)
        self._check_data()
        self.events.data_opened(self.data.train_samples, self.data.eval_samples)
        with self.runner.on_stream():
            for block in self.schedule.blocks(self.data.train_samples, self.run.global_batch):
                if block.index < self.progress.block:
                    continue
                self._train_block(block)
                if self._evaluate(block):
                    return
        self._stop_clock("aborted", None)

    def _train_block(self, block: Block) -> None:
        self._epoch, self._epoch_began = block.first_epoch, time.perf_counter()
        self.events.block_start(block)
        if block.epochs:
            self.events.epoch_start(self._epoch)
        last = block.first_epoch + block.epochs - 1
        self.bar.block(block.index, block.samples, f"epochs {block.first_epoch}-{last}" if block.epochs else "samples")
        self._shown = max(self.progress.samples, block.start_sample)
        batches = self.data.batches(block, start=self.progress.position)
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
        else:
            stopping = self._settle(pending, 0, block)
            if not stopping:
                self._finish_block(block)
                return
        self._settle(pending, 0, block)
        self._save()
        raise Interrupted(f"stopped by a signal at step {self.progress.step}; the log is closed as aborted")

    def _launch(self, micro_batches: list[Any], prefetcher: Prefetcher, pending: PendingReports) -> None:
        progress = self.progress
        number = progress.step + 1
        self.heartbeat.beat(number, "training")
        if self.signals.requested:
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
        self.progress = replace(progress, step=number, samples=samples, position=progress.position + len(micro_batches))
        every = self.session.checkpoint_every
        if every and number % every == 0:
            self._save()

    def _settle(self, pending: PendingReports, limit: int, block: Block) -> bool:
        """Read reports until at most ``limit`` are outstanding; whether one of them asks to stop."""
        stop = False
        while len(pending) > limit:
            stop = self._note(pending.pop(), block) or stop
        return stop

    def _note(self, done: Finished, block: Block) -> bool:
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
        )
        self.bar.update(done.samples - self._shown, loss)
        self._shown = done.samples
        if block.epochs:
            self._note_epochs(done.samples, block)
        return report.stop

    def _note_epochs(self, samples: int, block: Block) -> None:
        size = self.data.train_samples
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
        self.events.block_stop(block)
        self.progress = replace(done, block=block.index + 1, position=0)

    def _evaluate(self, block: Block) -> bool:
        """Evaluate after ``block``; whether the target is reached."""
        at = self._progress_number(block)
        with self.heartbeat.extended(self.session.timeout_seconds, "evaluation"):
            self.events.eval_start(at)
            self.evaluation.submit(self.workload.weights(), self.progress.samples)
            scores = self.evaluation.poll()
        reached = [score for score in scores if self._note_score(score, at)]
        self.events.eval_stop(at)
        if reached:
            self._stop_clock("success", reached[0])
        return bool(reached)

    def _note_score(self, score: Score, at: int) -> bool:
        value = score.values[self.run.benchmark.metric]
        history = (*self.progress.history, (score.samples, value))
        self.progress = replace(self.progress, history=history)
        self.events.accuracy(value, at, score.time_ms)
        self.metrics.evaluation(score.samples, score.values)
        self.bar.line(f"evaluation at {at}: {self.run.benchmark.metric} {value:.4f}, {self._target_text()}")
        return self.run.benchmark.reached(value)

    def _target_text(self) -> str:
        sign = ">=" if self.run.benchmark.direction == "higher" else "<="
        return f"target {sign} {self.run.benchmark.target:g}"

    def _progress_number(self, block: Block) -> int:
        return block.first_epoch + block.epochs - 1 if block.epochs else block.start_sample + block.samples

    def _stop_clock(self, status: str, score: Score | None) -> None:
        self.status = status
        self.run_stop_ms = score.time_ms if score else time.time_ns() // 1_000_000
        done = self.progress
        at = round(done.samples / self.run.benchmark.train_samples) if self.schedule.unit == "epoch" else done.samples
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
        if self.place.world_size > 1:
            dist.barrier()


def _from_rank_0(values: tuple[int, str], place: Place) -> tuple[int, str]:
    if place.world_size == 1:
        return values
    box: list[Any] = [values]
    dist.broadcast_object_list(box, src=0)
    chosen: tuple[int, str] = box[0]
    return chosen


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
