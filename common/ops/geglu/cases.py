"""Cases of GEGLU in the feed-forward layers of a latent U-Net, with the bias of the preceding linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import diffusion


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    rows: int,
    features: int,
    biased: bool = True,
    parameters: torch.dtype | None = None,
    spare: int = 0,
) -> list[Pass]:
    """Make the forward and backward passes. The backward pass includes the gradient of the bias.

    Args:
        parameters: dtype of the bias; None for that of the activations.
        spare: unused elements between the rows of the input, and between the rows of the result's gradient.
    """
    x = draw.normal(rows, 2 * features + spare, scale=2.0)[:, : 2 * features]
    dy = draw.normal(rows, features + spare)[:, :features]
    bias = draw.normal(2 * features, dtype=parameters) if biased else None
    unit = size_of(dy)
    return both_ways(
        lambda: function(x, bias),
        [each for each in (x, bias) if each is not None],
        [dy],
        moved=(3 * unit, 5 * unit),
    )


TESTS: tuple[dict[str, Any], ...] = (
    {"rows": 1, "features": 1},
    {"rows": 1300, "features": 16},  # several tiles per program
    {"rows": 70, "features": 24, "biased": False},
    {"rows": 33, "features": 600},  # several programs of columns
    {"rows": 64, "features": 32, "parameters": torch.float32},
    {"rows": 6, "features": 16, "spare": 16},
)

CASES = tuple(
    Case(
        f"Stable Diffusion, {4 * level.channels} at {level.side}",
        passes,
        {"rows": diffusion.PICTURES * level.side**2, "features": 4 * level.channels},
        tests=TESTS if level is diffusion.LEVELS[0] else (),
        gpu={"rows": 2 * level.side**2 + 1},
        dtypes=diffusion.DTYPES,
    )
    for level in diffusion.LEVELS
)
