"""Rotary positions of a fused product, and their gradient to FP8."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import rope
from common.ops.bench import cases
from common.ops.bench import decoder as size
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import fresh_scaling, normal, size_of
from common.ops.rope.reference import Rope


def case(function: Rope, batch: int, dtype: torch.dtype) -> list[Pass]:
    """As a layer has it."""
    qkv = normal(dtype, size.TOKENS, size.QKV)
    gradients = [
        normal(dtype, size.TOKENS, heads, size.HEAD_SIZE) for heads in (size.HEADS, size.KV_HEADS, size.KV_HEADS)
    ]
    cos, sin = rope.tables(torch.arange(size.TOKENS, device=cases.DEVICE), size.HEAD_SIZE, size.ROPE_BASE)
    scale, unit = fresh_scaling(), size_of(qkv)
    return [
        Pass("forward", lambda: function.forward(qkv, cos, sin, size.HEADS, size.KV_HEADS), 2 * unit),
        Pass(
            "backward",
            lambda: function.backward(*gradients, cos, sin, half=False, fp8=scale),
            unit + unit / dtype.itemsize,
        ),
    ]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("rope", rope.ROPE, "triton", {}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """Tokens, warps and programs."""
    from common.ops.rope import triton

    choices = {"forward": (0,), "backward": (4, 7, 8, 12)}
    build = functools.partial(case, rope.ROPE.function("triton"), 1)
    return {
        f"rope {key}": Sweep(
            triton.TILES, key, list(itertools.product((16, 32, 64, 128), (2, 4, 8), programs)), build, key == "backward"
        )
        for key, programs in choices.items()
    }
