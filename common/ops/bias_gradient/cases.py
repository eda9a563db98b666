"""Cases of bias gradients: those of the blocks of Stable Diffusion's U-Net."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.bias_gradient import RowSums
from common.ops.cases import Case, Draw, Pass, rotating
from common.ops.sizes import diffusion


def passes(function: RowSums, draw: Draw, rows: int, columns: int, spare: int = 0, single: bool = False) -> list[Pass]:
    """Make the only pass. Its inputs rotate, so that they are not in the L2 cache.

    Args:
        spare: unused elements between rows.
        single: whether the result is fp32.
    """
    moved = float(rows * columns * draw.dtype.itemsize)
    gradients = rotating(lambda: draw.normal(rows, columns + spare)[:, :columns], moved)

    def backward() -> Tensor:
        d_RC = next(gradients)
        return function(d_RC, torch.float32 if single and not draw.fp64 else d_RC.dtype)

    return [Pass("backward", backward, moved)]


TESTS = [
    {"rows": 384, "columns": 64},  # whole tiles in two programs
    {"rows": 1100, "columns": 80, "single": True},  # several tiles per program
    {"rows": 600, "columns": 17, "spare": 8},
    {"rows": 1, "columns": 4},
]

CASES = tuple(
    Case(
        f"Stable Diffusion, {level.channels} at {level.side}",
        passes,
        {"rows": diffusion.PICTURES * level.side**2, "columns": level.channels},
        tests=TESTS if level is diffusion.LEVELS[0] else (),
        gpu={"rows": diffusion.PICTURES * level.side**2 + 3},
        dtypes=diffusion.DTYPES,
    )
    for level in diffusion.LEVELS
)
