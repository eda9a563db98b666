"""The last convolution."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.unet3d.ops import output_convolution
from benchmarks.unet3d.ops.bench_layers import BATCHES, Layer, layers, volumes
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, layer: Layer) -> list[Pass]:
    """Its logits' gradient comes in their own format, as the loss leaves it."""
    x = volumes(batch, layer.channels, layer.size, dtype).requires_grad_()
    weight = volumes(layer.filters, layer.channels, layer.kernel, dtype).requires_grad_()
    bias = torch.zeros(layer.filters, device=cases.DEVICE, dtype=dtype, requires_grad=True)

    def forward() -> Tensor:
        return function(x, weight, bias)

    logits = forward().detach()
    read, written = (float(tensor.numel() * dtype.itemsize) for tensor in (x, logits))
    return both_ways(
        forward,
        [x, weight, bias],
        [torch.empty_like(logits).normal_()],
        moved=(read + written, 2 * read + written),
        flops=(batch * layer.flops, 2 * batch * layer.flops),
    )


def entries() -> list[Entry]:
    """Every implementation."""
    layer = layers()[-1]
    build, sizes = functools.partial(case, layer=layer), {"channels": layer.channels}
    return each("output_convolution", output_convolution.OUTPUT_CONVOLUTION, "triton", sizes, build)


def sweeps() -> dict[str, Sweep]:
    """Voxels, warps, programs and stages of both kernels."""
    from benchmarks.unet3d.ops.output_convolution import triton

    voxels = ((32, 4), (64, 2), (128, 4), (256, 4), (256, 8))
    choices: dict[str, list[tuple[int, ...]]] = {
        "forward": list(itertools.product((128, 256, 512, 1024), (4, 8), (0,), (1,))),
        "backward": [(*shape, *rest) for shape, *rest in itertools.product(voxels, (4, 8, 16), (1, 2, 3))],
    }
    function = output_convolution.OUTPUT_CONVOLUTION.function("triton")
    found = {}
    for batch in BATCHES:
        build = functools.partial(case, function, batch, layer=layers()[-1])
        for key, tiles in choices.items():
            name = f"output_convolution {key} n {batch}"
            found[name] = Sweep(triton.TILES, key, tiles, build, key == "backward")
    return found
