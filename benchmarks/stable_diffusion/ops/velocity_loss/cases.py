"""Cases of the velocity loss: a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.stable_diffusion.ops.noising.cases import CHANNELS, SIDE
from common.ops.cases import Case, Draw, Pass, both_ways
from common.ops.sizes import diffusion

LOSS_SCALE = 65536.0


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    channels: int,
    height: int,
    width: int,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward and backward pass of the scaled loss. The prediction is ``channels_last`` or contiguous."""
    prediction, target = (
        draw.normal(samples, height, width, channels, dtype=dtype).permute(0, 3, 1, 2)
        for dtype in (None, torch.float32)
    )
    if not channels_last:
        prediction = prediction.contiguous()
    scale = draw.rounded(torch.full((), LOSS_SCALE, device=draw.device), torch.float32)
    half, single = prediction.numel() * float(draw.dtype.itemsize), prediction.numel() * 4.0
    return both_ways(
        lambda: function(prediction, target), [prediction], [scale], moved=(half + single, 2 * half + single)
    )


CASES = (
    Case(
        "Stable Diffusion",
        passes,
        {"samples": diffusion.PICTURES, "channels": CHANNELS, "height": SIDE, "width": SIDE},
        tests=[
            {"samples": 3, "channels": 3, "height": 25, "width": 21},
            {"samples": 2, "height": 32, "width": 32, "channels_last": False},
        ],
        gpu={"samples": 3},
        dtypes=diffusion.DTYPES,
    ),
)
