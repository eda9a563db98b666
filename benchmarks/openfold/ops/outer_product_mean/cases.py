"""Cases of the outer product mean: the alignment of the Evoformer, and the extra sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import folding as size


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    sequences: int,
    i: int,
    j: int,
    channels: int,
    features: int,
) -> list[Pass]:
    """Make both passes, with factors that are parts of wider rows."""
    a_and_b = [draw.normal(samples, sequences, residues, 2 * channels) for residues in (i, j)]
    a, b = a_and_b[0][..., :channels], a_and_b[1][..., channels:]
    residual, dy = (draw.normal(samples, i, j, features) for _ in range(2))
    norm = draw.uniform(samples, i, j, low=1.0, high=sequences + 1.0, dtype=torch.float32)
    weight, bias = draw.normal(features, channels**2, scale=1 / channels), draw.normal(features)
    pairs, factors = samples * i * j, channels**2
    product = 2.0 * pairs * factors * (sequences + features)
    moved = size_of(a, b, residual, norm, weight, dy)
    return both_ways(
        lambda: function(residual, a, b, norm, weight, bias), [residual, a, b, weight, bias], [dy],
        moved=(moved, moved + size_of(a, b, weight)), flops=(product, product + 2.0 * pairs * factors * sequences),
    )  # fmt: skip


CROP = {"samples": 1, "i": size.RESIDUES, "j": size.RESIDUES, "channels": 32, "features": size.PAIR}
CASES = (
    Case(
        "alignment",
        passes,
        {**CROP, "sequences": size.CLUSTERS},
        tests=[{"samples": 2, "sequences": 5, "i": 3, "j": 7, "channels": 16, "features": 24}],
        gpu={"i": 65},
        dtypes=(torch.bfloat16,),
    ),
    Case(
        "extra sequences",
        passes,
        {**CROP, "sequences": size.SEQUENCES},
        tests=[{"sequences": 70, "i": 5, "j": 2, "features": 16}],
        gpu={"j": 65},
        dtypes=(torch.bfloat16,),
    ),
)
