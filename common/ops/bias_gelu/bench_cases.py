"""GELU of the feed-forward layer, between products in 16 bits and between products in FP8; without autograd at
GPT-3's sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from common.ops import bias_gelu
from common.ops.bench import gpt3
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each, rotating
from common.ops.bench.sweep import Sweep
from common.ops.bias_gelu.reference import BiasGelu
from common.ops.fp8_cast.reference import E4M3, Handover, cast_reference


def case(function: Callable[..., Any], packs: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions."""
    x, bias = size.leaf(dtype, packs * size.LENGTH, size.FEED_FORWARD), size.leaf(dtype, size.FEED_FORWARD)
    unit = size.size_of(x)
    return both_ways(lambda: function(x, bias), [x, bias], [torch.randn_like(x)], moved=(2 * unit, 3 * unit))


def fp8_case(function: Callable[..., Any], packs: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions, each writing FP8 instead of 16 bits."""
    x, bias = size.leaf(dtype, packs * size.LENGTH, size.FEED_FORWARD), size.leaf(dtype, size.FEED_FORWARD)
    unit, in_fp8, fp8, handover = size.size_of(x), x.numel(), size.fresh_scaling(), Handover(size.fresh_scaling())
    return both_ways(
        lambda: function(x, bias, fp8=fp8, handover=handover).source,
        [x, bias],
        [torch.randn_like(x)],
        moved=(unit + 1.0 * in_fp8, 2 * unit + 1.0 * in_fp8),
    )


def written_case(function: BiasGelu, batch: int, dtype: torch.dtype, *, features: int) -> list[Pass]:
    """Between two products of a decoder in FP8, whose first result is kept as it is, or in FP8 as well."""
    shape = gpt3.TOKENS, features
    unit = float(shape[0] * shape[1] * dtype.itemsize)
    in_fp8, bias = unit / dtype.itemsize, size.normal(dtype, features)
    scales = [size.fresh_scaling() for _ in range(5)]
    twos = rotating(lambda: [size.normal(dtype, *shape) for _ in range(2)], 2 * unit)
    saved = cast_reference(next(twos)[0], size.fresh_scaling(), E4M3, False)

    def saved_backward() -> object:
        return function.backward(next(twos)[0], saved, bias, fp8=scales[4])

    return [
        Pass("forward", lambda: function.forward(next(twos)[0], bias, fp8=scales[0]), unit + in_fp8),
        Pass("backward", lambda: function.backward(*next(twos), bias, fp8=scales[3]), 2 * unit + in_fp8),
        Pass(
            "saving forward",
            lambda: function.forward(next(twos)[0], bias, fp8=scales[1], save_fp8=scales[2]),
            unit + 2 * in_fp8,
        ),
        Pass("saved backward", saved_backward, unit + 2 * in_fp8),
    ]


def entries() -> list[Entry]:
    """Every implementation; a layer has one."""
    sizes = {"features": size.FEED_FORWARD}
    return [
        *each("bias_gelu", bias_gelu.BIAS_GELU, "triton", sizes, case, calls=size.LAYERS),
        *each("bias_gelu to fp8", bias_gelu.BIAS_GELU, "triton", sizes, fp8_case, calls=0),
        *(
            entry
            for features in (gpt3.FEED_FORWARD // ranks for ranks in gpt3.RANKS)
            for entry in each(
                f"bias_gelu written {features}",
                bias_gelu.BIAS_GELU_PASSES,
                "triton",
                {},
                functools.partial(written_case, features=features),
                calls=0,
            )
        ),
    ]


def sweeps() -> dict[str, Sweep]:
    """Rows, columns, warps and programs of all kernels, stages of those that write FP8."""
    from common.ops.bias_gelu import triton

    tiles = [(4096 * scale // columns, columns) for columns in (256, 512, 1024) for scale in (1, 2)]
    choices = {
        "forward": [(*tile, warps, 0) for tile in tiles for warps in (4, 8)],
        "backward": [(*tile, warps, programs) for tile in tiles for warps in (4, 8) for programs in (2, 4, 8)],
    }
    shapes = ((4, 1024, 4), (4, 1024, 8), (2, 1024, 4), (8, 512, 4), (8, 512, 8), (16, 256, 8))
    function = bias_gelu.BIAS_GELU.function("triton")
    build, build_fp8 = (functools.partial(which, function, size.PACKS) for which in (case, fp8_case))
    return (
        {
            f"bias_gelu {key}": Sweep(triton.TILES, key, tiles, build, key == "backward")
            for key, tiles in choices.items()
        }
        | {
            f"bias_gelu to fp8 {key}": Sweep(
                triton.FP8_TILES,
                key,
                [(*shape, *rest) for shape, *rest in itertools.product(shapes, (2, 4, 8), (1, 2, 3))],
                build_fp8,
                key == "backward",
            )
            for key in choices
        }
        | {
            "bias_gelu save": Sweep(
                triton.FP8_TILES,
                "save",
                [(*shape, *rest) for shape, *rest in itertools.product(shapes, (1, 2, 4), (1, 2, 3))],
                lambda dtype: written_case(
                    bias_gelu.BIAS_GELU_PASSES.function("triton"), 1, dtype, features=gpt3.FEED_FORWARD // gpt3.RANKS[0]
                )[2:],
                False,
            )
        }
    )
