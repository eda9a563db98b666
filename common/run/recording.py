"""What is kept and shown of each step that the device has finished."""

from __future__ import annotations

from common.data.batches import Block
from common.errors import SuiteError
from common.observe.metrics import MetricsWriter
from common.observe.nvml import GpuMeter
from common.observe.progress_bar import Progress as ProgressBar
from common.step.in_flight import Finished

OVERFLOWS_TOLERATED = 50  # iterations in a row with gradients that are not finite


class Recording:
    """Takes the results of steps to the metrics, the progress bar and the run's own figures.

    Args:
        metrics, bar: where steps are written.
        meter: of this rank's GPU, read with every step.

    Attributes:
        losses: (training samples counted, loss) of each step.
        overflows: steps that changed nothing since their gradients were not finite.
        samples: nominal training samples done with the last step, or before the block: what the schedule counts.
        counted: real training samples done, over all ranks: what log and rates count. Where a step reports none, its
            nominal ones.
    """

    def __init__(self, metrics: MetricsWriter, meter: GpuMeter, bar: ProgressBar) -> None:
        self._metrics, self._meter, self._bar = metrics, meter, bar
        self.losses: list[tuple[int, float]] = []
        self.overflows = 0
        self.samples = self.counted = 0
        self._overflows_in_a_row = 0

    def block_begins(self, block: Block, samples: int) -> None:
        """What follows is of ``block``; ``samples`` were done before, over all ranks."""
        last = block.first_epoch + block.epochs - 1
        label = f"epochs {block.first_epoch}-{last}" if block.epochs else "samples"
        self._bar.block(block.index, block.samples, label)
        self.samples = max(samples, block.start_sample)

    def step(self, done: Finished) -> None:
        """Record a step.

        Raises:
            SuiteError: too many steps in a row had gradients that were not finite.
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
