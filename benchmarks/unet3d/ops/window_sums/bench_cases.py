"""Adding windows and counting classes. A training step runs neither, so that they add nothing to its sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.unet3d.ops import window_sums
from benchmarks.unet3d.ops.bench_layers import FACTS, SIZE, volumes
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

EDGE = 2 * SIZE
"""Voxels of an axis of the volume."""


def sums() -> Tensor:
    """Of a volume, (D, H, W, K)."""
    return torch.empty((EDGE, EDGE, EDGE, FACTS.classes), device=cases.DEVICE).normal_()


def add_case(function: Callable[..., Any], batch: int, dtype: torch.dtype) -> list[Pass]:
    """A batch of windows, one after another, into the middle of a volume."""
    logits, volume = volumes(batch, FACTS.classes, SIZE, dtype), sums()
    place = volume[SIZE // 2 :, SIZE // 2 :, SIZE // 2 :][:SIZE, :SIZE, :SIZE]
    importance = [torch.rand(SIZE, device=cases.DEVICE) for _ in range(3)]

    def forward() -> None:
        for window in logits:
            function(place, window, importance)

    return [Pass("forward", forward, logits.numel() * (dtype.itemsize + 2.0 * volume.element_size()))]


def count_case(function: Callable[..., Any], batch: int, dtype: torch.dtype) -> list[Pass]:
    """The classes of one volume after another."""
    volume = sums()
    label = torch.randint(FACTS.classes, volume.shape[:3], device=cases.DEVICE, dtype=torch.uint8)
    counts = torch.zeros((FACTS.classes, 3), device=cases.DEVICE, dtype=torch.int64)

    def forward() -> None:
        for _ in range(batch):
            function(volume, label, counts)

    return [Pass("forward", forward, batch * (float(volume.numel()) * volume.element_size() + label.numel()))]


def entries() -> list[Entry]:
    """Every implementation of both."""
    return [
        *each("windows added", window_sums.ADD_WINDOW, "triton", {}, add_case, calls=0),
        *each("windows counted", window_sums.COUNT_CLASSES, "triton", {}, count_case, calls=0),
    ]


def sweeps() -> dict[str, Sweep]:
    """The kernels have no table of tiles."""
    return {}
