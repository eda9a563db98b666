"""Residual addition and LayerNorm to FP8, backward to FP8 with the residual's gradient, the result once more, and the
gradients of the parameters."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import layer_norm_1p
from common.ops.bench import cases
from common.ops.bench import gpt3 as size
from common.ops.bench.cases import Entry, Pass, each, rotating
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import fresh_scaling, normal
from common.ops.layer_norm_1p.reference import LayerNorm1p


def case(function: LayerNorm1p, batch: int, dtype: torch.dtype, *, tokens: int) -> list[Pass]:
    """As a layer has it, whose tokens are in no cache."""
    weight, bias, added = (normal(dtype, size.HIDDEN) for _ in range(3))
    moments = torch.ones(2, tokens, device=cases.DEVICE)
    forward_scale, backward_scale = fresh_scaling(), fresh_scaling()
    unit = float(tokens * size.HIDDEN * dtype.itemsize)
    in_fp8 = unit / dtype.itemsize
    threes = rotating(lambda: [normal(dtype, tokens, size.HIDDEN) for _ in range(3)], 3 * unit)

    def forward() -> object:
        residual, delta, _ = next(threes)
        return function.forward(residual, delta, added, weight, bias, size.EPSILON, half=False, fp8=forward_scale)

    def backward() -> object:
        dy, residual, d_residual = next(threes)
        return function.backward(dy, residual, moments, weight, d_residual, fp8=backward_scale)

    def parameters() -> object:
        dy, residual, dx = next(threes)
        return function.parameter_gradients(dy, residual, moments, dx)

    return [
        Pass("forward", forward, 3 * unit + in_fp8),
        Pass("backward", backward, 4 * unit + in_fp8),
        Pass("once more", lambda: function.recompute(next(threes)[0], moments, weight, bias), 2 * unit),
        Pass("parameters", parameters, 3 * unit),
    ]


def entries() -> list[Entry]:
    """Every implementation, at the tokens of a rank."""
    found = []
    for ranks in size.RANKS:
        tokens = size.TOKENS // ranks
        build = functools.partial(case, tokens=tokens)
        sizes = {"features": size.HIDDEN}
        found += each(f"layer_norm_1p {tokens}", layer_norm_1p.LAYER_NORM_1P, "triton", sizes, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """Warps, programs and stages of the passes over whole rows, tiles of the gradients of the parameters."""
    from common.ops.layer_norm_1p import triton

    function = layer_norm_1p.LAYER_NORM_1P.function("triton")
    build = functools.partial(case, function, 1, tokens=size.TOKENS // size.RANKS[0])
    rows = list(itertools.product((1,), (8, 16, 32), (1, 2, 3), (1, 2, 3, 4)))
    blocks = [
        (*tile, programs)
        for tile in ((8, 256, 4), (16, 256, 4), (4, 512, 4), (8, 512, 8), (16, 128, 4), (16, 256, 8))
        for programs in (4, 8, 16)
    ]
    return {
        f"layer_norm_1p {key}": Sweep(triton.TILES, key, rows, build, key == "backward")
        for key in ("forward", "backward")
    } | {
        "layer_norm_1p parameters": Sweep(
            triton.BLOCKS, "parameter_gradients", blocks, lambda dtype: build(dtype)[3:], False
        )
    }
