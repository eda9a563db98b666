"""Records each step that the device has finished: metrics, progress bar, and the run's own figures."""

from __future__ import annotations

from common.data.batches import Block, DataSource, GenerationSource
from common.errors import SuiteError
from common.observe.metrics import MetricsWriter
from common.observe.nvml import GpuMeter
from common.observe.progress_bar import ProgressBar
from common.step.train_step import Finished

OVERFLOWS_TOLERATED = 50  # consecutive iterations with gradients that are not finite


class Recording:
    """Writes the results of steps to metrics and progress bar, and counts samples and overflows.

    Attributes:
        losses: (real training samples so far, loss) of each step.
        overflows: number of steps that updated nothing because a gradient was not finite.
        samples: finished nominal training samples, as the schedule counts; at least the start of the block.
        counted: finished real training samples over all ranks, for log and rates. A step that reports none counts with
            its nominal ones.
    """

    def __init__(self, metrics: MetricsWriter, meter: GpuMeter, bar: ProgressBar) -> None:
        self._metrics, self._meter, self._bar = metrics, meter, bar
        self.losses: list[tuple[int, float]] = []
        self.overflows = 0
        self.samples = self.counted = 0
        self._overflows_in_a_row = 0

    def block_begins(self, block: Block, samples: int) -> None:
        """Start a block. ``samples`` nominal samples over all ranks are finished before it."""
        last = block.first_epoch + block.epochs - 1
        label = f"epochs {block.first_epoch}-{last}" if block.epochs else "samples"
        self._bar.block(block.index, block.samples, label)
        self.samples = max(samples, block.start_sample)

    def step(self, done: Finished) -> None:
        """Record a finished step.

        Raises:
            SuiteError: too many consecutive steps had gradients that were not finite.
        """
        result = done.result
        self.overflows += result.overflow
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if result.overflow else 0
        if self._overflows_in_a_row >= OVERFLOWS_TOLERATED:
            raise SuiteError(
                f"the gradients were not finite in {self._overflows_in_a_row} steps in a row up to step {done.step}: "
                "the run diverged; look at the loss in the metrics, the learning rate and the precision"
            )
        nominal = done.samples - self.samples
        self.counted += nominal if result.samples is None else result.samples
        loss = result.metrics.get("loss", float("nan"))
        self.losses.append((self.counted, loss))
        others = {name: value for name, value in result.metrics.items() if name != "loss"}
        self._metrics.write(
            done.step,
            self.counted,
            loss,
            step_ms=done.step_ms,
            data_wait_ms=done.data_wait_ms,
            overflow=float(result.overflow),
            **others,
            **self._meter.sample(),
        )
        self._bar.update(nominal, loss)
        self.samples = done.samples

    def self_play(self, data: DataSource, generation: int) -> None:
        """Record what self-play on this rank has done for a generation, if self-play makes the data."""
        if not isinstance(data, GenerationSource) or not (measures := data.measures()):
            return
        self._metrics.self_play(generation=generation, **measures)
        shown = (f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in measures.items())
        self._bar.line(f"self-play before generation {generation}: {', '.join(shown)}")
