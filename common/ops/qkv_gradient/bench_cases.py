"""The gradient of a product by heads: in FP8, in one order and in both, joined in 16 bits, and the bias's sums alone,
as where attention has written in place."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import qkv_gradient
from common.ops.bench import gpt3 as size
from common.ops.bench.cases import Entry, Pass, each, rotating
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import fresh_scaling, normal
from common.ops.qkv_gradient import JoinQkv


def case(function: JoinQkv, batch: int, dtype: torch.dtype, *, heads: int) -> list[Pass]:
    """As a layer has it."""
    unit = 3.0 * size.TOKENS * heads * size.HEAD_SIZE * dtype.itemsize
    in_fp8 = unit / dtype.itemsize
    separate = rotating(lambda: [normal(dtype, size.TOKENS, heads, size.HEAD_SIZE) for _ in range(3)], unit)
    packed = rotating(lambda: normal(dtype, size.TOKENS, heads, 3, size.HEAD_SIZE).unbind(2), unit)
    scales = fresh_scaling(), fresh_scaling()
    return [
        Pass("in FP8", lambda: function(*next(separate), half=False, fp8=scales[0]), unit + in_fp8),
        Pass(
            "in both orders",
            lambda: function(*next(separate), half=False, fp8=scales[1], transpose=True),
            unit + 2 * in_fp8,
        ),
        Pass("joined", lambda: function(*next(separate)), 2 * unit),
        Pass("in place", lambda: function(*next(packed)), unit),
    ]


def entries() -> list[Entry]:
    """Every implementation, with the heads of a rank."""
    found = []
    for ranks in size.RANKS:
        heads = size.HEADS // ranks
        build = functools.partial(case, heads=heads)
        found += each(f"qkv_gradient {heads}", qkv_gradient.QKV_GRADIENT, "triton", {}, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """Rows, warps, programs and stages, in one order and in both."""
    from common.ops.qkv_gradient import triton

    choices = list(itertools.product((32, 64, 128), (4, 8), (2, 4, 8), (1, 2, 3)))
    function = qkv_gradient.QKV_GRADIENT.function("triton")
    build = functools.partial(case, function, 1, heads=size.HEADS // size.RANKS[0])
    return {
        f"qkv_gradient {name}": Sweep(triton.TILES, "join", choices, build, both)
        for name, both in (("in FP8", False), ("in both orders", True))
    }
