"""How pictures become tensors: what both readers of RetinaNet's data are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.retinanet.config import Facts
from common.data.order import sample_generator
from common.detection.reader_config import ReaderConfig


@dataclass(frozen=True)
class DataSettings:
    """What the rules fix of the pictures, how they are read, and the form of the tensors.

    Attributes:
        facts: classes, size, mirror and normalisation.
        reader: reader, threads, room for boxes.
        dtype: of the pictures.
    """

    facts: Facts
    reader: ReaderConfig
    dtype: torch.dtype

    def mirrors(self, seed: int, epoch: int, sample: int) -> bool:
        """Whether a training picture is flipped left to right in an epoch: a function of the arguments alone."""
        return bool(sample_generator(seed, epoch, sample).random() < self.facts.mirror)
