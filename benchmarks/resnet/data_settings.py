"""How pictures become tensors: what both readers of ResNet-50's data are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.resnet.config import Facts, ReaderConfig


@dataclass(frozen=True)
class DataSettings:
    """What the rules fix of the pictures, how they are read, and the form of the tensors.

    Attributes:
        facts: classes, sizes, crops, mirror and normalisation.
        reader: reader, threads, caches.
        dtype: of the pictures.
    """

    facts: Facts
    reader: ReaderConfig
    dtype: torch.dtype
