"""Settings that both readers of RetinaNet's data use to turn pictures into tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.retinanet.config import Facts
from common.data.order import sample_generator
from common.detection.reader_config import ReaderConfig


@dataclass(frozen=True)
class DataSettings:
    """Picture constants of the rules, reader configuration and dtype of the tensors.

    Attributes:
        dtype: dtype of the pictures.
    """

    facts: Facts
    reader: ReaderConfig
    dtype: torch.dtype

    def mirrors(self, seed: int, epoch: int, sample: int) -> bool:
        """Return whether a training picture is flipped left to right in an epoch. Depends only on the arguments."""
        return bool(sample_generator(seed, epoch, sample).random() < self.facts.mirror)
