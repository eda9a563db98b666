"""SwiGLU to FP8 with its input saved in FP8, and its gradient to FP8."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import swiglu
from common.ops.bench import decoder as size
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import fresh_scaling, normal, size_of
from common.ops.fp8_cast.reference import E4M3, cast_reference
from common.ops.swiglu.reference import SwiGlu


def case(function: SwiGlu, batch: int, dtype: torch.dtype) -> list[Pass]:
    """As a layer has it."""
    gate_up = normal(dtype, size.TOKENS, 2 * size.FEED_FORWARD)
    dy = normal(dtype, size.TOKENS, size.FEED_FORWARD)
    saved = cast_reference(gate_up, fresh_scaling(), E4M3, False)
    scale, saved_scale, backward_scale = fresh_scaling(), fresh_scaling(), fresh_scaling()
    unit = size_of(dy)
    in_fp8 = unit / dtype.itemsize
    return [
        Pass("forward", lambda: function.forward(gate_up, fp8=scale, save_fp8=saved_scale), 2 * unit + 3 * in_fp8),
        Pass("backward", lambda: function.backward(dy, saved, fp8=backward_scale), unit + 4 * in_fp8),
    ]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("swiglu", swiglu.SWIGLU, "triton", {}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """Rows, columns, warps, programs and stages."""
    from common.ops.swiglu import triton

    tiles = [(2, 1024, 4), (4, 1024, 8), (4, 1024, 4), (1, 1024, 4), (4, 512, 4), (2, 2048, 8), (1, 2048, 8)]
    choices = [(*tile, programs, stages) for tile, programs, stages in itertools.product(tiles, (2, 4, 8, 12), (1, 2))]
    build = functools.partial(case, swiglu.SWIGLU.function("triton"), 1)
    return {
        f"swiglu {key}": Sweep(triton.TILES, key, choices, build, key == "backward") for key in ("forward", "backward")
    }
