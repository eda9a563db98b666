"""Cases of the loss: contiguous logits, as the last convolution writes them, and channels_last_3d logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.unet3d.ops.sizes import FACTS, SAMPLES
from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.local_convolution.cases import volumes


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    classes: int,
    volume: tuple[int, int, int],
    channels_last: bool,
    scale: float = 2.0,
    strided: bool = False,
) -> list[Pass]:
    """Return forward and backward pass. Sample 1 has only background and the last class, sample 2 only background.

    Args:
        volume: (D, H, W).
        channels_last: memory format of the logits.
        scale: standard deviation of the logits.
        strided: whether logits and labels are every other voxel of wider tensors.
    """
    step = 1 + strided
    depth, height, width = volume
    wide = (depth, height, step * width)
    logits = volumes(draw, samples, classes, wide, channels_last=channels_last, scale=scale)
    label = draw.integers(0, classes, samples, *wide, dtype=torch.uint8)
    label[1:2] *= label[1:2] == classes - 1
    label[2:3] = 0
    logits, label = logits[..., ::step], label[..., ::step]
    # the number of voxels, which keeps gradients within the range of fp16
    d_loss = draw.rounded(torch.tensor(float(label.numel()), device=draw.device), torch.float32)
    return both_ways(
        lambda: function(logits, label, FACTS.dice_smooth),
        [logits],
        [d_loss],
        moved=(size_of(logits, label), 2 * size_of(logits) + size_of(label)),
    )


SIZES = {"samples": SAMPLES, "classes": FACTS.classes, "volume": FACTS.input_shape}

CASES = (
    Case(
        "3D U-Net",
        passes,
        {**SIZES, "channels_last": False},
        tests=[
            {"samples": 1, "volume": (9, 13, 50)},  # several programs of several blocks; the last is not full
            {"samples": 2, "volume": (5, 6, 7), "strided": True},
            {"samples": 1, "volume": (5, 6, 7), "scale": 1e4},
        ],
        gpu={},
        tolerance=2.0,
    ),
    Case(
        "3D U-Net, channels last",
        passes,
        {**SIZES, "channels_last": True},
        tests=[
            {"samples": 1, "volume": (2, 32, 32)},  # full blocks
            {"samples": 3, "volume": (5, 6, 27)},
            {"samples": 40, "volume": (2, 3, 4)},  # more samples than are added at once
        ],
        gpu={"samples": 3, "volume": (33, 35, 37)},
    ),
)
