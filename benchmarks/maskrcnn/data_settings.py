"""What both readers of Mask R-CNN's data are told."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.maskrcnn.config import Facts, MaskReaderConfig
from common.data.order import sample_generator


@dataclass(frozen=True)
class DataSettings:
    """What the rules fix of the pictures, and how they are read.

    Attributes:
        facts: sizes and mirroring.
        reader: reader, threads, room for objects, shapes of batches.
    """

    facts: Facts
    reader: MaskReaderConfig

    def mirrors(self, seed: int, epoch: int, sample: int) -> bool:
        """Whether ``sample`` is flipped left to right in ``epoch`` (from 0); a function of the arguments alone."""
        return bool(sample_generator(seed, epoch, sample).random() < self.facts.mirror)
