"""Settings that both readers of SSD300's data use to turn pictures into tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.ssd300.config import Facts
from common.detection.reader_config import ReaderConfig


@dataclass(frozen=True)
class DataSettings:
    """Picture constants of the rules, reader configuration, crop attempts and dtype of the tensors.

    Attributes:
        crop_attempts: attempts per kind of crop.
        dtype: dtype of the pictures.
    """

    facts: Facts
    reader: ReaderConfig
    crop_attempts: int
    dtype: torch.dtype
