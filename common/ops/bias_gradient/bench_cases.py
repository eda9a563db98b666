"""Gradients of the biases at the ends of a latent U-Net's blocks."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import bias_gradient
from common.ops.bench.cases import Entry, Pass, each, rotating
from common.ops.bench.latent_unet import BATCHES, TRANSFORMERS
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import normal
from common.ops.bias_gradient import RowSums


def case(function: RowSums, packs: int, dtype: torch.dtype, *, rows: int, columns: int) -> list[Pass]:
    """One pass, which is a part of the backward pass."""
    moved = float(rows * columns * dtype.itemsize)
    gradients = rotating(lambda: normal(dtype, rows, columns), moved)
    return [Pass("backward", lambda: function(next(gradients), dtype), moved)]


def entries() -> list[Entry]:
    """Every level in every implementation."""
    found = []
    for samples, (channels, side) in itertools.product(BATCHES, TRANSFORMERS):
        build = functools.partial(case, rows=samples * side**2, columns=channels)
        name = f"bias_gradient {channels}@{side} n {samples}"
        found += each(name, bias_gradient.BIAS_GRADIENT, "triton", {}, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """Tiles of the one pass."""
    from common.ops.bias_gradient import triton

    choices = list(itertools.product((64, 128, 256), (2048, 4096, 8192), (4, 8), (2, 4, 8), (1, 3)))
    build = functools.partial(case, bias_gradient.BIAS_GRADIENT.function("triton"), 0, rows=32 * 64**2, columns=320)
    return {"bias_gradient": Sweep(triton.TILES, "sums", choices, build, False)}
