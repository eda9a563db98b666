"""Cases of the factors of the triangle multiplication: pairs of a crop, and of four templates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import folding as size


def passes(
    function: Callable[..., tuple[Tensor, Tensor]],
    draw: Draw,
    pairs: int,
    channels: int,
    mask: torch.dtype = torch.float32,
) -> list[Pass]:
    """Make both passes. A fifth of the pairs are masked; ``mask`` is the dtype of the mask."""
    projected = draw.normal(pairs, 4 * channels)
    exists = draw.integers(0, 5, pairs, dtype=torch.int32).clamp(max=1)
    exists = exists.double() if draw.fp64 and mask.is_floating_point else exists.to(mask)
    gradients = [draw.normal(channels, pairs) for _ in range(2)]
    moved = size_of(projected, *gradients)
    return both_ways(
        lambda: function(projected, exists), [projected], gradients, moved=(moved, moved + size_of(projected))
    )


PAIRS = size.RESIDUES**2
CASES = (
    Case(
        "pairs",
        passes,
        {"pairs": PAIRS, "channels": size.PAIR},
        tests=[{"pairs": 70, "channels": 40}, {"pairs": 9, "channels": 130, "mask": torch.bool}],
        gpu={"pairs": 1001},
        dtypes=size.DTYPES,
    ),
    Case("pairs of the templates", passes, {"pairs": size.TEMPLATES * PAIRS, "channels": 64}, dtypes=size.DTYPES),
)
