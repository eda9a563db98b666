"""Test and benchmark cases of the dot interaction at the sizes of DLRM."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import recommendation


def passes(
    function: Callable[..., Tensor], draw: Draw, samples: int, vectors: int, width: int, columns: int, transposed: bool
) -> list[Pass]:
    """Return the forward and backward pass. If ``transposed``, the gradient of the result is not contiguous."""
    x, dy = draw.normal(samples, vectors, width), draw.normal(samples, columns)
    if transposed:
        dy = dy.t().contiguous().t()
    flops = 2.0 * samples * width * (vectors * (vectors - 1) // 2)
    return both_ways(
        lambda: function(x, columns),
        [x],
        [dy],
        moved=(size_of(x, dy), 2 * size_of(x) + size_of(dy)),
        flops=(flops, 2 * flops),
    )


CASES = (
    Case(
        "DLRM",
        passes,
        {"samples": recommendation.SAMPLES, "vectors": 27, "width": 128, "columns": 480, "transposed": False},
        tests=[
            {"samples": 5},
            {"samples": 4, "columns": 479},
            {"samples": 9, "vectors": 5, "width": 20, "columns": 40, "transposed": True},
            {"samples": 1, "vectors": 1, "width": 16, "columns": 16},
            {"samples": 0, "vectors": 5, "width": 16, "columns": 32},
        ],
        gpu={"samples": 1001},
    ),
)
