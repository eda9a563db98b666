"""The dot interaction of DLRM, in every implementation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.dlrm.ops import dot_interaction
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

VECTORS, WIDTH, COLUMNS = 27, 128, 480
SAMPLES = 6912
"""Of a micro-batch, an eighth of 55,296."""


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions for ``batch`` samples."""
    x = torch.randn((batch, VECTORS, WIDTH), device=cases.DEVICE).to(dtype).requires_grad_()
    dy = torch.randn((batch, COLUMNS), device=cases.DEVICE).to(dtype)
    x_bytes, y_bytes = (float(each.numel() * dtype.itemsize) for each in (x, dy))
    flops = 2.0 * batch * WIDTH * VECTORS * (VECTORS - 1) // 2
    moved = x_bytes + y_bytes, 2 * x_bytes + y_bytes
    return both_ways(lambda: function(x, COLUMNS), [x], [dy], moved=moved, flops=(flops, 2 * flops))


def entries() -> list[Entry]:
    """Every implementation."""
    sizes = {"vectors": VECTORS, "width": WIDTH}
    return each("dot_interaction", dot_interaction.DOT_INTERACTION, "triton", sizes, case)


def sweeps() -> dict[str, Sweep]:
    """Samples of a program, warps and stages."""
    from benchmarks.dlrm.ops.dot_interaction import triton

    build = functools.partial(case, dot_interaction.DOT_INTERACTION.function("triton"), SAMPLES)
    tiles = list(itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 3, 4)))
    return {f"dot_interaction {key}": Sweep(triton.TILES, key, tiles, build, key == "backward") for key in triton.TILES}
