"""Settings that both readers of Mask R-CNN's data use."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.maskrcnn.config import Facts, MaskReaderConfig
from common.data.order import sample_generator


@dataclass(frozen=True)
class DataSettings:
    """Picture constants of the rules and reader configuration."""

    facts: Facts
    reader: MaskReaderConfig

    def mirrors(self, seed: int, epoch: int, sample: int) -> bool:
        """Return whether ``sample`` is flipped left to right in ``epoch``. Depends only on the arguments."""
        return bool(sample_generator(seed, epoch, sample).random() < self.facts.mirror)
