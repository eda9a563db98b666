"""The loss of a micro-batch at the real size."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.stable_diffusion.ops import velocity_loss
from benchmarks.stable_diffusion.ops.noising.bench_cases import BATCHES, CHANNELS, PLACES
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions, the loss scaled."""
    prediction, target = (
        torch.randn((batch, CHANNELS, PLACES, PLACES), device=cases.DEVICE).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    prediction = prediction.to(dtype).requires_grad_()
    scale = torch.full((), 65536.0, device=cases.DEVICE)
    half, single = prediction.numel() * float(dtype.itemsize), prediction.numel() * 4.0
    return both_ways(
        lambda: function(prediction, target), [prediction], [scale], moved=(half + single, 2 * half + single)
    )


def entries() -> list[Entry]:
    """Every implementation."""
    return each("velocity_loss", velocity_loss.VELOCITY_LOSS, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Elements and warps."""
    from benchmarks.stable_diffusion.ops.velocity_loss import triton

    tiles = list(itertools.product((512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)))
    function = velocity_loss.VELOCITY_LOSS.function("triton")
    return {
        f"velocity_loss {key} n {batch}": Sweep(
            triton.TILES, key, tiles, functools.partial(case, function, batch), key == "backward"
        )
        for key in triton.TILES
        for batch in BATCHES
    }
