"""Settings that both readers of ResNet-50's data use to turn pictures into tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.resnet.config import Facts, ReaderConfig


@dataclass(frozen=True)
class DataSettings:
    """Picture constants of the rules, reader configuration and dtype of the tensors.

    Attributes:
        dtype: dtype of the pictures.
    """

    facts: Facts
    reader: ReaderConfig
    dtype: torch.dtype
