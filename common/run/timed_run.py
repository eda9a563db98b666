"""The clock of a run, and the log events of its blocks and epochs.

The host launches steps ahead of the device, but the log describes the device: a block start or an epoch end is logged
once the step before it is known to be finished, with the time at which the step finished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.contract.evaluation import Score, Weights
from common.data.batches import Block, DataSource, GenerationSource
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.rules import Rules
from common.mlperf.schedules import Schedule

UNSCORED = "unscored"
"""Status of a run whose training is over and whose checkpoints are not scored yet."""


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Attributes:
        seconds: time by ``time.perf_counter``.
        time_ms: milliseconds since the epoch; None means the time of logging.
    """

    seconds: float
    time_ms: int | None = None

    @classmethod
    def now(cls) -> Moment:
        """Return the current moment."""
        return cls(time.perf_counter())

    @classmethod
    def past(cls, seconds: float) -> Moment:
        """Return the moment at which ``time.perf_counter`` was ``seconds``."""
        ago = time.perf_counter() - seconds
        return cls(seconds, (time.time_ns() - round(ago * 1e9)) // 1_000_000)


class TimedRun:
    """A run from ``run_start`` to ``run_stop``: logs its blocks and epochs in the units of the rules.

    Args:
        schedule: determines the unit of the run: epochs, samples or generations.
        train_samples: training samples per epoch, unless the schedule has its own number.
        global_batch: samples per step, for a ruleset that counts steps.
        sample_tokens: tokens per sample, for a ruleset that counts tokens.

    Attributes:
        status: ``"success"``, ``"aborted"``, or :data:`UNSCORED`.
        start_ms, stop_ms: milliseconds since the epoch; 0 before the event.
        samples: finished training samples at ``run_stop``, including those before a resumed run's checkpoint.
    """

    def __init__(
        self,
        log: RunLog,
        rules: Rules,
        schedule: Schedule,
        train_samples: int,
        global_batch: int = 1,
        sample_tokens: int | None = None,
    ) -> None:
        self._counts_epochs = schedule.unit == "epoch"
        self._counts_generations = schedule.unit == "generation"
        self._epoch_samples = schedule.epoch_samples or train_samples
        # Samples per epoch, to convert epochs for a ruleset that counts samples although the schedule counts epochs.
        converted = self._epoch_samples if self._counts_epochs and rules.unit == "samples" else None
        fraction_of = self._epoch_samples if rules.unit == "epoch fraction" else None
        self.events = RunEvents(
            log, rules.progress_key, converted, rules.quality_key, fraction_of, rules.fractions_from,
            global_batch if rules.unit == "steps" else None, rules.quality_together,
            sample_tokens if rules.unit == "tokens" else None,
        )  # fmt: skip
        self.status = "aborted"
        self.start_ms = self.stop_ms = 0
        self.samples = 0
        self._step = 0
        self._due: deque[tuple[int, Callable[[Moment], None]]] = deque()
        self._block: Block | None = None
        self._block_began = self._epoch_began = 0.0
        self._epoch = self._epoch_before = self._before = self._generations = 0

    @property
    def running(self) -> bool:
        """Whether the run has started and not stopped."""
        return self.start_ms > 0 and not self.stop_ms

    def start(self, step: int) -> None:
        """Log ``run_start``. ``step`` steps were finished before, in an earlier run."""
        self._step = step
        self.start_ms = time.time_ns() // 1_000_000
        self.events.run_start()

    def after(self, step: int, action: Callable[[Moment], None]) -> None:
        """Call ``action`` once ``step`` is known to be finished, with the moment at which it finished.

        If it is finished already, call it now, with the current moment. Actions run in order; steps must not decrease.
        """
        if step <= self._step:
            action(Moment.now())
        else:
            self._due.append((step, action))

    def step_done(self, step: int, samples: int, ended: float) -> None:
        """Note that the device has finished ``step``.

        Args:
            step: number of the step, in order without gaps.
            samples: finished nominal training samples after it, over all ranks.
            ended: time at which it finished, by ``time.perf_counter``.
        """
        at = Moment.past(ended)
        self._note_epochs(samples, at)
        self._step = step
        while self._due and self._due[0][0] <= step:
            self._due.popleft()[1](at)

    def block_begins(self, block: Block, nominal: int, counted: int, at: Moment) -> None:
        """Log the start of a block, or its continuation in a resumed run, which logs only epochs that it ends itself.

        Args:
            nominal: finished nominal training samples over all ranks, as the schedule counts.
            counted: finished real training samples over all ranks.
        """
        self._block = block
        self._block_began = self._epoch_began = at.seconds
        self._before = counted
        self.events.block_start(block, counted, at.time_ms)
        if block.epochs:
            self._epoch_before = max(nominal, block.start_sample)
            done = self._epoch_before - block.start_sample
            ended = done // (block.samples // block.epochs) if block.samples else 0
            self._epoch = block.first_epoch + ended
            self._generations = block.first_epoch - 1
            if ended < block.epochs:
                self.events.epoch_start(self._epoch, at.time_ms)

    def block_ends(self, samples: int, at: Moment) -> None:
        """Log the end of the block, after ``samples`` real training samples over all ranks."""
        assert self._block is not None, "a block begins first"
        rate = (samples - self._before) / (at.seconds - self._block_began)
        if not self._block.samples:  # a generation, whose last step was not known before
            self.events.epoch_stop(self._epoch, rate, at.time_ms)
            self._generations = self._epoch
        self.events.block_stop(self._block, samples, rate, at.time_ms)

    def handed_over(self, data: DataSource, block: Block, weights: Weights) -> Weights:
        """Return ``weights``. If self-play makes the data, first save the weights, and log the games behind them.

        Collective.
        """
        if isinstance(data, GenerationSource):
            data.trained(block, weights.tensors)
            self.events.self_play_games(data.games(block), self._generations)
        return weights

    def evaluation_point(self, block: Block, samples: int) -> int:
        """Return the position of the evaluation after ``block`` in the log: finished epochs, or else ``samples``."""
        return block.first_epoch + block.epochs - 1 if block.epochs else samples

    def stop(self, status: str, launched: int, counted: int, ending: tuple[Score, int] | None) -> None:
        """Log ``run_stop`` once, with the time of the score that ends the run, or else the current time.

        Args:
            status: ``"success"`` or ``"aborted"``.
            launched: launched nominal training samples, over all ranks.
            counted: finished real training samples.
            ending: the score that ends the run and its epochs or samples in the log; None if no score ends it.
        """
        if self.stop_ms:
            return
        at = round(launched / self._epoch_samples) if self._counts_epochs else counted
        at = self._generations if self._counts_generations else at
        self.status, self.samples, self.stop_ms = status, counted, time.time_ns() // 1_000_000
        if ending is not None:
            score, at = ending
            self.stop_ms = max(score.time_ms, self.start_ms + 1)  # a checkpoint may be older than the resumed run
            self.samples = counted if score.point is None else score.point.counted
        self.events.run_stop(status, at, self.stop_ms)

    def leave(self, counted: int) -> None:
        """End training without logging a result: the log stays open until the checkpoints are scored.

        ``counted``: finished real training samples.
        """
        self.status, self.samples, self.stop_ms = UNSCORED, counted, time.time_ns() // 1_000_000

    def _note_epochs(self, samples: int, at: Moment) -> None:
        """Log the epochs that end with ``samples``. Epochs that end in the same step share its rate."""
        block = self._block
        if block is None or not block.epochs or not block.samples:
            return
        size, end = block.samples // block.epochs, block.first_epoch + block.epochs
        ended = min(samples // size, end - 1) - self._epoch + 1
        if ended <= 0:
            return
        done = (self._epoch - 1 + ended) * size
        rate = (done - self._epoch_before) / (at.seconds - self._epoch_began)
        self._epoch_began, self._epoch_before = at.seconds, done
        for _ in range(ended):
            self.events.epoch_stop(self._epoch, rate, at.time_ms)
            self._epoch += 1
            if self._epoch < end:
                self.events.epoch_start(self._epoch, at.time_ms)
