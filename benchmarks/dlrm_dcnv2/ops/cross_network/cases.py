"""Test and benchmark cases of the cross network (all layers together) at the sizes of DLRM-DCNv2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import recommendation


def passes(
    function: Callable[..., Tensor], draw: Draw, samples: int, inputs: int, rank: int, layers: int, training: bool
) -> list[Pass]:
    """Return both passes of ``training``, or the forward pass of an evaluation, which saves nothing for backward."""
    x0, dy = draw.normal(samples, inputs), draw.normal(samples, inputs)
    v = [draw.normal(rank, inputs, scale=inputs**-0.5) for _ in range(layers)]
    w = [draw.normal(inputs, rank, scale=rank**-0.5) for _ in range(layers)]
    b = [draw.normal(inputs) for _ in range(layers)]

    @torch.no_grad()
    def evaluate() -> Tensor:
        return function(x0, v, w, b)

    unit = size_of(x0)
    narrow = unit * rank / inputs
    flops = 2.0 * layers * samples * 2 * inputs * rank
    # Each layer's forward pass reads x twice and x0 once, and writes h and y. Its backward pass reads dy, x0, h and
    # dx0, and writes dy, dh and dx0; its products read dh twice and x once. The last layer reads no dx0.
    moved = layers * (5 * unit + 2 * narrow), layers * (10 * unit + 4 * narrow) - unit
    if not training:
        return [Pass("evaluation", evaluate, layers * (4 * unit + 2 * narrow), flops)]
    return both_ways(lambda: function(x0, v, w, b), [x0, *v, *w, *b], [dy], moved=moved, flops=(flops, 2 * flops))


CASES = (
    Case(
        "DLRM-DCNv2",
        passes,
        {"samples": recommendation.SAMPLES, "inputs": 3456, "rank": 512, "layers": 3, "training": True},
        tests=[
            {"samples": 64, "inputs": 256, "rank": 32, "layers": 1},
            {"samples": 70, "inputs": 72, "rank": 40, "layers": 3},
            {"samples": 530, "inputs": 72, "rank": 24, "layers": 1},
            {"samples": 70, "inputs": 40, "rank": 24, "layers": 2, "training": False},
        ],
        gpu={"samples": 1000},
    ),
)
