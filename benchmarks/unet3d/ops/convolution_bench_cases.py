"""The 3x3x3 convolutions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.unet3d.model import INPUT_CHANNELS
from benchmarks.unet3d.ops.bench_layers import BATCHES, Layer, layers, volumes
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.local_convolution.folded import FOLDED_CHANNELS
from common.ops.local_convolution.reference import LocalConvolution


def case(function: Callable[[], LocalConvolution], batch: int, dtype: torch.dtype, *, layer: Layer) -> list[Pass]:
    """Forward, gradient of the input but for an image, gradient of the weight."""
    convolution = function()
    x = volumes(batch, layer.channels, layer.size * layer.stride, dtype)
    dy = volumes(batch, layer.filters, layer.size, dtype)
    weight = volumes(layer.filters, layer.channels, layer.kernel, dtype)

    def backward(needs: tuple[bool, bool]) -> Any:
        return convolution.backward(dy, x, weight, layer.stride, needs)

    flops = batch * layer.flops
    moved = float((x.numel() + dy.numel() + weight.numel()) * dtype.itemsize)
    forward = Pass("forward", lambda: convolution.forward(x, weight, layer.stride), moved, flops)
    weight_gradient = Pass("weight gradient", lambda: backward((False, True)), moved, flops)
    if layer.channels == INPUT_CHANNELS:
        return [forward, weight_gradient]
    return [forward, Pass("input gradient", lambda: backward((True, False)), moved, flops), weight_gradient]


def entries() -> list[Entry]:
    """Every convolution in the implementations that could serve it."""
    found = []
    for layer in layers():
        if layer.kernel == 3:
            names = ["reference"]
            if layer.channels == INPUT_CHANNELS:
                names.insert(0, "triton")
            elif layer.stride == 1 and layer.filters <= FOLDED_CHANNELS:
                names.insert(0, "folded")
            build = functools.partial(case, layer=layer)
            found += each(
                f"conv {layer.name}", LOCAL_CONVOLUTION, names[0], {"channels": layer.channels}, build, only=names
            )
    return found


def sweeps() -> dict[str, Sweep]:
    """Voxels, warps, programs and stages of the first layer's kernels."""
    from common.ops.local_convolution import triton

    voxels = ((64, 2), (128, 4), (256, 4), (256, 8))
    choices: dict[str, list[tuple[int, ...]]] = {
        "forward": [(*shape, programs, 1) for shape, programs in itertools.product(voxels, (0, 4, 6, 8))],
        "weight": [(*shape, *rest) for shape, *rest in itertools.product(voxels, (4, 6, 8), (1, 2, 3))],
    }
    function = LOCAL_CONVOLUTION.function("triton")
    return {
        f"first conv {key} n {batch}": Sweep(
            triton.TILES, key, tiles, functools.partial(case, function, batch, layer=layers()[0]), key == "weight"
        )
        for batch in BATCHES
        for key, tiles in choices.items()
    }
