"""How pictures become tensors: what both readers of SSD300's data are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.ssd300.config import Facts
from common.detection.reader_config import ReaderConfig


@dataclass(frozen=True)
class DataSettings:
    """What the rules fix of the pictures, how they are read, and the form of the tensors.

    Attributes:
        facts: size, crops, mirror, changes of colour and normalisation.
        reader: reader, threads, room for boxes.
        crop_attempts: crops that are tried of a kind.
        dtype: of the pictures.
    """

    facts: Facts
    reader: ReaderConfig
    crop_attempts: int
    dtype: torch.dtype
