"""The way up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.unet3d.ops import upsample
from benchmarks.unet3d.ops.bench_layers import BATCHES, Layer, layers, volumes
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, layer: Layer) -> list[Pass]:
    """Transposed convolution and skip connection; backward has all four gradients."""
    x = volumes(batch, layer.channels, layer.size // 2, dtype).requires_grad_()
    skip = volumes(batch, layer.filters, layer.size, dtype).requires_grad_()
    weight = volumes(layer.channels, layer.filters, layer.kernel, dtype).requires_grad_()
    bias = torch.zeros(layer.filters, device=cases.DEVICE, dtype=dtype, requires_grad=True)
    d_joined = volumes(batch, 2 * layer.filters, layer.size, dtype)
    inner, outer = (float(tensor.numel() * dtype.itemsize) for tensor in (x, skip))
    return both_ways(
        lambda: function(x, weight, bias, skip),
        [x, weight, bias, skip],
        [d_joined],
        moved=(inner + 3 * outer, 2 * inner + outer),
        flops=(batch * layer.flops, 2 * batch * layer.flops),
    )


def entries() -> list[Entry]:
    """Every block of the way up in every implementation."""
    found = []
    for layer in layers():
        if layer.kernel == 2:
            name, build = layer.name.removesuffix(".transposed"), functools.partial(case, layer=layer)
            sizes = {"channels": layer.filters}
            found += each(f"upsample {name}", upsample.UPSAMPLE, "triton", sizes, build)
    return found


def sweeps() -> dict[str, Sweep]:
    """Tiles of the product and of the bias's gradient, at every block."""
    from benchmarks.unet3d.ops.upsample import triton

    products: list[tuple[int, ...]] = [(64, 128, 64, 4), (128, 64, 64, 4), (64, 64, 64, 4), (32, 128, 64, 4)]
    products += [(128, 128, 64, 4), (128, 128, 64, 8), (64, 256, 64, 8)]
    walking: list[tuple[int, ...]] = list(itertools.product((64,), (4096, 8192, 16384), (4, 8), (2, 4), (1, 3)))
    function = upsample.UPSAMPLE.function("triton")
    found = {}
    for batch in BATCHES:
        for layer in layers():
            if layer.kernel == 2:
                build = functools.partial(case, function, batch, layer=layer)
                name = f"{layer.name.removesuffix('.transposed')} n {batch}"
                found[f"upsample forward {name}"] = Sweep(triton.FORWARD_TILES, "forward", products, build, False)
                found[f"upsample backward {name}"] = Sweep(triton.BACKWARD_TILES, "backward", walking, build, True)
    return found
