"""Residual addition and RMSNorm to FP8, backward to FP8 with the residual's gradient, the result once more, and the
weight's gradient."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import rms_norm
from common.ops.bench import cases
from common.ops.bench import decoder as size
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import fresh_scaling, normal, size_of
from common.ops.rms_norm.reference import RmsNorm


def case(function: RmsNorm, batch: int, dtype: torch.dtype) -> list[Pass]:
    """As a layer has it."""
    residual, delta, dy, d_residual = (normal(dtype, size.TOKENS, size.HIDDEN) for _ in range(4))
    weight = normal(dtype, size.HIDDEN)
    inverse_rms = torch.ones(size.TOKENS, device=cases.DEVICE)
    forward_scale, backward_scale = fresh_scaling(), fresh_scaling()
    unit = size_of(residual)
    in_fp8 = unit / dtype.itemsize
    return [
        Pass(
            "forward",
            lambda: function.forward(residual, delta, weight, size.EPSILON, half=False, fp8=forward_scale),
            3 * unit + in_fp8,
        ),
        Pass(
            "backward",
            lambda: function.backward(dy, residual, inverse_rms, weight, d_residual, fp8=backward_scale),
            4 * unit + in_fp8,
        ),
        Pass("once more", lambda: function.recompute(residual, inverse_rms, weight), 2 * unit),
        Pass("weight gradient", lambda: function.weight_gradient(dy, residual, inverse_rms), 2 * unit),
    ]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("rms_norm", rms_norm.RMS_NORM, "triton", {"features": size.HIDDEN}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """Rows, warps, programs and stages."""
    from common.ops.rms_norm import triton

    choices = list(itertools.product((1, 2), (8, 16, 32), (1, 2, 3, 4), (1, 2)))
    build = functools.partial(case, rms_norm.RMS_NORM.function("triton"), 1)
    return {
        f"rms_norm {key}": Sweep(triton.TILES, key, choices, build, key == "backward")
        for key in ("forward", "backward")
    }
