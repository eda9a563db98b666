"""Samples in stored order. Each micro-batch position reads its own contiguous share.

The set is cut into contiguous shares, one for each stream (:meth:`common.data.order.MicroBatches.stream`); the first
shares have one sample more if they are not equal. A stream reads its share in order, repeatedly, without gaps. So N
replicas with one micro-batch each see the same data as one replica that accumulates N. The number of streams is the
global batch divided by the micro-batch: with another size of the micro-batch, a global batch has other samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.data.order import ReplicaStream
from common.errors import ConfigError


@dataclass(frozen=True)
class ContiguousShares(ReplicaStream):
    """The samples in each micro-batch of one replica; a :class:`common.data.order.SampleStream`.

    Raises:
        ConfigError: there are fewer samples than micro-batches of a global batch.
    """

    def __post_init__(self) -> None:
        if self.train_samples < self.mine.streams:
            raise ConfigError(
                f"train_samples={self.train_samples}: fewer than the {self.mine.streams} micro-batches of a step"
            )

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (pass over the share, sample) pairs of this replica's micro-batch ``number``, from 0."""
        step, accumulation_step = self.mine.step_of(number)
        share = self.mine.stream(accumulation_step)
        size, larger = divmod(self.train_samples, self.mine.streams)
        first, length = share * size + min(share, larger), size + (share < larger)
        positions = range(step * self.micro_batch, (step + 1) * self.micro_batch)
        return [(position // length, first + position % length) for position in positions]

    def first_id(self, number: int) -> int:
        """Return the id of the first sample of this replica's micro-batch ``number``."""
        return self.mine.global_index(number) * self.micro_batch
