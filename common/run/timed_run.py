"""The clock of a run, and what the log says of the blocks and epochs that it measures.

The host launches steps ahead of the device. What the log says of training it says of the device: that a block begins
or that an epoch is over, once the step before it is known to be done, with the time at which it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.contract.evaluation import Score
from common.data.batches import Block
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.rules import Rules
from common.mlperf.schedules import Schedule

UNSCORED = "unscored"
"""Status of a run whose training is over and whose checkpoints wait to be scored."""


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Attributes:
        seconds: of the host's monotonic clock.
        time_ms: milliseconds since the epoch; None for the time at which it is logged.
    """

    seconds: float
    time_ms: int | None = None

    @classmethod
    def now(cls) -> Moment:
        """This one."""
        return cls(time.perf_counter())

    @classmethod
    def past(cls, seconds: float) -> Moment:
        """The one at which the host's monotonic clock showed ``seconds``."""
        ago = time.perf_counter() - seconds
        return cls(seconds, (time.time_ns() - round(ago * 1e9)) // 1_000_000)


class TimedRun:
    """A run from ``run_start`` to ``run_stop``: its blocks and epochs, in the units of its log.

    Args:
        log: of the run.
        rules: say what the log counts.
        schedule: says what the run counts, epochs or samples.
        train_samples: training samples of an epoch, unless the schedule counts others.
        global_batch: samples of a step, for a ruleset that counts steps.
        sample_tokens: tokens of a sample, for a ruleset that counts tokens.

    Attributes:
        events: what is logged.
        status: ``"success"``, ``"aborted"``, or :data:`UNSCORED`.
        start_ms, stop_ms: milliseconds since the epoch; 0 before.
        samples: training samples that had been done at ``run_stop``, those before a resumed run's checkpoint too.
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
        self._epoch_samples = schedule.epoch_samples or train_samples
        # What the log multiplies epochs with, where the ruleset does not count as the schedule does.
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
        self._epoch = self._epoch_before = self._before = 0

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self.start_ms > 0 and not self.stop_ms

    def start(self, step: int) -> None:
        """Log ``run_start``; ``step`` were done before, in an earlier run."""
        self._step = step
        self.start_ms = time.time_ns() // 1_000_000
        self.events.run_start()

    def after(self, step: int, action: Callable[[Moment], None]) -> None:
        """Call ``action`` once ``step`` is known to be done: now if it is, else with the moment at which it was.

        Actions are called in the order in which they came; their steps must not descend.
        """
        if step <= self._step:
            action(Moment.now())
        else:
            self._due.append((step, action))

    def step_done(self, step: int, samples: int, ended: float) -> None:
        """Note that the device had done ``step`` when the host's monotonic clock showed ``ended``.

        Args:
            step: the one after that noted before.
            samples: training samples done with it, over all ranks.
            ended: seconds.
        """
        at = Moment.past(ended)
        self._note_epochs(samples, at)
        self._step = step
        while self._due and self._due[0][0] <= step:
            self._due.popleft()[1](at)

    def block_begins(self, block: Block, nominal: int, counted: int, at: Moment) -> None:
        """Training of a block begins, or goes on in a resumed run, whose log has only epochs that it ends itself.

        Args:
            block: it.
            nominal: training samples done, over all ranks, as the schedule counts them.
            counted: real ones.
            at: when.
        """
        self._block = block
        self._block_began = self._epoch_began = at.seconds
        self._before = counted
        self.events.block_start(block, counted, at.time_ms)
        if block.epochs:
            self._epoch_before = max(nominal, block.start_sample)
            ended = (self._epoch_before - block.start_sample) // (block.samples // block.epochs)
            self._epoch = block.first_epoch + ended
            if ended < block.epochs:
                self.events.epoch_start(self._epoch, at.time_ms)

    def block_ends(self, samples: int, at: Moment) -> None:
        """The block is over, and ``samples`` are done with it, over all ranks."""
        assert self._block is not None, "a block begins first"
        rate = (samples - self._before) / (at.seconds - self._block_began)
        self.events.block_stop(self._block, samples, rate, at.time_ms)

    def evaluation_point(self, block: Block, samples: int) -> int:
        """The number of the evaluation after ``block``: epochs, or the ``samples`` that are done."""
        return block.first_epoch + block.epochs - 1 if block.epochs else samples

    def stop(self, status: str, launched: int, counted: int, ending: tuple[Score, int] | None) -> None:
        """Log ``run_stop``, once: of the score that reached the target, or now.

        Args:
            status: ``"success"`` or ``"aborted"``.
            launched: nominal training samples that were launched, over all ranks.
            counted: real ones that are done.
            ending: the score that ends the run and the number of its evaluation; None if none does.
        """
        if self.stop_ms:
            return
        at = round(launched / self._epoch_samples) if self._counts_epochs else counted
        self.status, self.samples, self.stop_ms = status, counted, time.time_ns() // 1_000_000
        if ending is not None:
            score, at = ending
            self.stop_ms = max(score.time_ms, self.start_ms + 1)  # a resumed run's checkpoint may be older
            self.samples = counted if score.point is None else score.point.counted
        self.events.run_stop(status, at, self.stop_ms)

    def leave(self, counted: int) -> None:
        """Training is over and nobody knows yet what came of it: the log is left open for whoever scores.

        ``counted``: real training samples that are done.
        """
        self.status, self.samples, self.stop_ms = UNSCORED, counted, time.time_ns() // 1_000_000

    def _note_epochs(self, samples: int, at: Moment) -> None:
        """Log the epochs that end with ``samples``; those that one step ends share its rate."""
        block = self._block
        if block is None or not block.epochs:
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
