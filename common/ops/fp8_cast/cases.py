"""Cases of casts to FP8 with transposes: each different shape of an encoder layer once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor
from common.ops.sizes import transformer as size


def passes(
    function: Callable[..., Fp8Tensor],
    draw: Draw,
    matrices: tuple[tuple[int, int], ...],
    to: torch.dtype,
    transpose: bool = True,
    frozen: bool = False,
    scale: float = 0.0,
    last: float | None = None,
    every: float | None = None,
) -> list[Pass]:
    """Make the pass, which casts one or more matrices; in measurements, they exceed the L2 cache together.

    Values have random mantissas, and exponents from far below to above the range of the format.

    Args:
        matrices: rows and columns of each matrix.
        to: FP8 format.
        frozen: leave the scales as they are.
        scale: scale that the previous use left; 0 before the first use.
        last: value of the last element, which no sample contains; None for a random one.
        every: value of all elements, except the last if ``last`` is given; None for random ones.
    """

    def values(rows: int, columns: int) -> Tensor:
        exponents = draw.integers(-20, 14, rows, columns, dtype=torch.float32)
        x = draw.normal(rows, columns).float() * exponents.exp2()
        if every is not None:
            x.fill_(every)
        if last is not None:
            x[-1, -1] = last
        return draw.rounded(x)

    inputs = [(values(*each), draw.scaling(scale)) for each in matrices]

    def run() -> list[tuple[Any, ...]]:
        results = []
        for x, state in inputs:
            x8 = function(x, state, to, transpose, frozen)
            written = [None if matrix is None else matrix.view(torch.uint8) for matrix in (x8.data, x8.transposed)]
            results.append((*written, x8.scale_inverse, state.scale, state.pending))
        return results

    elements = sum(rows * columns for rows, columns in matrices)
    return [Pass("forward", run, float(elements * (draw.dtype.itemsize + 1 + transpose)))]


TOKENS = size.PACKS * size.LENGTH
SPECIAL = [
    {"matrices": ((80, 48),), "scale": scale, **values}
    for scale in (0.0, 3.0)
    for values in (*({"last": value} for value in (math.nan, math.inf, -math.inf)), {"every": 0.0}, {"every": 2e-38})
]
CASES = (
    Case(
        "BERT-large inputs and weights",
        passes,
        {
            "matrices": (
                *((TOKENS, columns) for columns in (size.HIDDEN, size.FEED_FORWARD)),
                *((rows, columns) for columns, rows in size.LINEAR.values()),
            ),
            "to": E4M3,
        },
        tests=[
            {"matrices": ((16, 16), (272, 208)), "scale": 1.7},
            {"matrices": ((600, 48), (80, 144)), "transpose": False},
            {"matrices": ((80, 48),), "frozen": True},
            {"matrices": ((80, 48),), "frozen": True, "scale": 1.7},
            *SPECIAL,
        ],
        gpu={"matrices": ((4112, 1040), (5008, 272), (16, 4096))},
        dtypes=(torch.float16, torch.bfloat16),
        exact=True,
    ),
    Case(
        "BERT-large gradients",
        passes,
        {"matrices": tuple((TOKENS, rows) for rows in (size.HIDDEN, 3 * size.HIDDEN, size.FEED_FORWARD)), "to": E5M2},
        tests=[{"matrices": ((272, 208),), "scale": 7.3}, {"matrices": ((600, 48),)}, *SPECIAL],
        gpu={"matrices": ((4112, 1040), (5008, 272), (16, 4096)), "scale": 7.3},
        dtypes=(torch.float16, torch.bfloat16),
        exact=True,
    ),
)
