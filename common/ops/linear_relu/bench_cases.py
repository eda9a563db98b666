"""The linear layers with ReLU of DLRM-DCNv2, each once, in every implementation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import linear_relu
from common.ops.bench import cases
from common.ops.bench import recommendation as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, layer: str) -> list[Pass]:
    """Both directions of a layer."""
    inputs, outputs = size.LAYERS[layer]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=cases.DEVICE).to(dtype)

    x, weight, bias = normal(size.SAMPLES, inputs), normal(outputs, inputs) / inputs**0.5, normal(outputs)
    dy = normal(size.SAMPLES, outputs)
    x_bytes, y_bytes, w_bytes = (float(each.numel() * dtype.itemsize) for each in (x, dy, weight))
    flops = 2.0 * size.SAMPLES * weight.numel()
    return both_ways(
        lambda: function(x, weight, bias),
        [value.requires_grad_() for value in (x, weight, bias)],
        [dy],
        # dy and y are read and the masked gradient is written, which two products read
        moved=(x_bytes + w_bytes + y_bytes, 5 * y_bytes + 2 * x_bytes + 2 * w_bytes),
        flops=(flops, 2 * flops),
    )


def entries() -> list[Entry]:
    """Every implementation of every layer."""
    return [
        entry
        for layer in size.LAYERS
        for entry in each(
            f"linear_relu {layer}",
            linear_relu.LINEAR_RELU,
            "fused",
            {},
            functools.partial(case, layer=layer),
            calls=0,
        )
    ]


def sweeps() -> dict[str, Sweep]:
    """Tiles of the pass in front of the ReLU."""
    from common.ops.linear_relu import triton

    tiles = list(itertools.product((32, 64, 128, 256), (2048, 4096, 8192), (4, 8), (2, 4, 8), (1, 2, 3)))
    build = functools.partial(case, linear_relu.LINEAR_RELU.function("fused"), size.SAMPLES, layer="top 2")
    return {"linear_relu gradient": Sweep(triton.TILES, "gradient", tiles, build, True)}
