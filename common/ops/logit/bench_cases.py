"""The last layer of DLRM's top MLP, in every implementation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import logit
from common.ops.bench import cases
from common.ops.bench import recommendation as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions."""
    x = torch.randn((size.SAMPLES, size.LAST_INPUTS), device=cases.DEVICE).to(dtype).requires_grad_()
    weight = torch.randn((1, size.LAST_INPUTS), device=cases.DEVICE).to(dtype).requires_grad_()
    bias = torch.zeros(1, device=cases.DEVICE).to(dtype).requires_grad_()
    dlogit = torch.randn(size.SAMPLES, device=cases.DEVICE)
    x_bytes, y_bytes = float(x.numel() * dtype.itemsize), 4.0 * size.SAMPLES
    flops = 2.0 * x.numel()
    moved = x_bytes + y_bytes, 2 * x_bytes + y_bytes
    return both_ways(
        lambda: function(x, weight, bias), [x, weight, bias], [dlogit], moved=moved, flops=(flops, 2 * flops)
    )


def entries() -> list[Entry]:
    """Every implementation."""
    return each("logit", logit.LOGIT, "fused", {"inputs": size.LAST_INPUTS}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """Elements and warps."""
    from common.ops.logit import triton

    tiles = list(itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8)))
    build = functools.partial(case, logit.LOGIT.function("fused"), size.SAMPLES)
    return {f"logit {key}": Sweep(triton.TILES, key, tiles, build, key == "backward") for key in triton.TILES}
