"""Noising of a micro-batch of moments at the real size."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.ops import noising
from benchmarks.stable_diffusion.ops.noising import Noised
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

CHANNELS, PLACES = 4, 64
"""Of a latent, and along its sides."""
LATENT_SCALE = 0.18215
BATCHES = (32, 2)
"""Pictures of a micro-batch, at which tiles are tried."""


def case(function: Callable[..., Noised], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Moments in fp32 to latents in ``dtype`` and a target in fp32."""
    moments = torch.randn((batch, 2 * CHANNELS, PLACES, PLACES), device=cases.DEVICE)
    seed = torch.full((), 1234567890123, dtype=torch.int64, device=cases.DEVICE)
    ids = torch.arange(batch, device=cases.DEVICE)
    table = noising.tables(abar(), LATENT_SCALE, dtype, torch.device(cases.DEVICE))
    moved = moments.numel() * (4.0 + dtype.itemsize / 2 + 2.0)
    return [Pass("forward", lambda: function(moments, seed, ids, table), moved)]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("noising", noising.NOISING, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Elements and warps."""
    from benchmarks.stable_diffusion.ops.noising import triton

    tiles = list(itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8)))
    function = noising.NOISING.function("triton")
    return {
        f"noising n {batch}": Sweep(triton.TILES, "noising", tiles, functools.partial(case, function, batch), False)
        for batch in BATCHES
    }
