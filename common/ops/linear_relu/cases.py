"""Cases of a linear layer with ReLU: each layer of DLRM-DCNv2 once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import recommendation


def passes(
    function: Callable[..., Tensor], draw: Draw, samples: int, inputs: int, outputs: int, rows: str
) -> list[Pass]:
    """Make the forward and backward passes.

    The first term of each sum is 9 or -9, larger than the others together, so that rounding never changes the mask of
    the ReLU.

    Args:
        rows: memory layout: ``dense``, ``apart`` (unused elements between the rows of input and gradient), or
            ``transposed`` (the gradient only).
    """
    spare = 3 if rows == "apart" else 0
    x, weight = draw.normal(samples, inputs + spare)[:, :inputs], draw.normal(outputs, inputs, scale=inputs**-0.5)
    for factors in (x[:, 0], weight[:, 0]):
        factors.copy_(3.0 * factors.sign())
    bias, dy = draw.normal(outputs), draw.normal(samples, outputs + spare)[:, spare:]
    if rows == "transposed":
        dy = dy.t().contiguous().t()
    flops = 2.0 * samples * weight.numel()
    return both_ways(
        lambda: function(x, weight, bias),
        [x, weight, bias],
        [dy],
        # dy and y are read, the masked gradient is written, and two products read it
        moved=(size_of(x, weight, dy), 5 * size_of(dy) + 2 * size_of(x, weight)),
        flops=(flops, 2 * flops),
    )


TESTS = (
    {"samples": 64, "inputs": 8, "outputs": 32},
    {"samples": 100, "inputs": 13, "outputs": 200},
    {"samples": 1100, "inputs": 5, "outputs": 40, "rows": "apart"},
    {"samples": 37, "inputs": 8, "outputs": 40, "rows": "transposed"},
)

CASES = tuple(
    Case(
        layer,
        passes,
        {"samples": recommendation.SAMPLES, "inputs": inputs, "outputs": outputs, "rows": "dense"},
        tests=TESTS if layer == "top 2" else (),
        gpu={"samples": 1001},
    )
    for layer, (inputs, outputs) in recommendation.LAYERS.items()
)
