"""Cases of the gradients of the biases at the ends of a latent U-Net's blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.bias_gradient import RowSums
from common.ops.cases import Case, Draw, Pass, rotating
from common.ops.sizes import diffusion


def passes(function: RowSums, draw: Draw, rows: int, columns: int, spare: int = 0, single: bool = False) -> list[Pass]:
    """One pass, a part of the backward pass, whose input is in no cache.

    Args:
        spare: elements between rows.
        single: the result is in fp32.
    """
    moved = float(rows * columns * draw.dtype.itemsize)
    gradients = rotating(lambda: draw.normal(rows, columns + spare)[:, :columns], moved)

    def backward() -> Tensor:
        d_RC = next(gradients)
        return function(d_RC, torch.float32 if single and not draw.wide else d_RC.dtype)

    return [Pass("backward", backward, moved)]


CASES = tuple(
    Case(
        f"Stable Diffusion, {level.channels} at {level.side}",
        passes,
        {"rows": diffusion.PICTURES * level.side**2, "columns": level.channels},
        tests=tests,
        gpu={"rows": diffusion.PICTURES * level.side**2 + 3},
        dtypes=diffusion.DTYPES,
    )
    for level, tests in zip(
        diffusion.LEVELS,
        (
            [
                {"rows": 384, "columns": 64},  # whole tiles in two programs
                {"rows": 1100, "columns": 80, "single": True},  # programs that have several tiles
                {"rows": 600, "columns": 17, "spare": 8},
                {"rows": 1, "columns": 4},
            ],
            (),
            (),
            (),
        ),
        strict=True,
    )
)
