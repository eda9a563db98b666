"""The layers of 3D U-Net at the sizes of a 128^3 crop, at which its operations are measured.

Activations are channels_last_3d, logits contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.unet3d.config import Facts
from benchmarks.unet3d.model import INPUT_CHANNELS
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases

SIZE = 128
BATCHES = (7, 1)
"""Samples of a micro-batch, at which tiles are tried."""

FACTS = fixed_facts(Facts, "unet3d")


class Layer(NamedTuple):
    """A convolution: channels in and out, voxels of an axis of its output, kernel and stride."""

    name: str
    channels: int
    filters: int
    size: int
    kernel: int = 3
    stride: int = 1

    @property
    def flops(self) -> float:
        """Of forward for one sample; every voxel of a transposed convolution has a single tap."""
        taps = 1 if self.kernel == 2 else self.kernel**3
        return 2.0 * self.channels * self.filters * taps * self.size**3


def layers() -> list[Layer]:
    """The convolutions of the network, in order; transposed ones have a kernel of 2."""
    first = FACTS.filters[0]
    found = [
        Layer("input_block.conv1", INPUT_CHANNELS, first, SIZE),
        Layer("input_block.conv2", first, first, SIZE),
    ]
    for level, (name, narrow, wide) in enumerate(FACTS.down, 1):
        found += [
            Layer(f"{name}.conv1", narrow, wide, SIZE >> level, stride=2),
            Layer(f"{name}.conv2", wide, wide, SIZE >> level),
        ]
    for level, (name, wide, narrow) in zip(reversed(range(len(FACTS.up))), FACTS.up, strict=True):
        found += [
            Layer(f"{name}.transposed", wide, narrow, SIZE >> level, kernel=2, stride=2),
            Layer(f"{name}.conv1", 2 * narrow, narrow, SIZE >> level),
            Layer(f"{name}.conv2", narrow, narrow, SIZE >> level),
        ]
    return [*found, Layer("output", first, FACTS.classes, SIZE, kernel=1)]


def norms() -> dict[tuple[int, int, int], int]:
    """Channels, size and readers of every norm, and how many have them."""
    found: dict[tuple[int, int, int], int] = {}
    for layer in layers():
        if layer.kernel == 3:
            skipped = not layer.name.startswith(("up", "bottleneck")) and layer.name.endswith("conv2")
            key = layer.filters, layer.size, 2 if skipped else 1
            found[key] = found.get(key, 0) + 1
    return found


def volumes(batch: int, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Normal values, channels_last_3d."""
    shape = (batch, channels, size, size, size)
    return torch.empty(shape, device=cases.DEVICE, dtype=dtype, memory_format=torch.channels_last_3d).normal_()
