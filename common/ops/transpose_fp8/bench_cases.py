"""Transposes of a layer's weights: 1 byte read and 1 written per element."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.ops import transpose_fp8
from common.ops.bench import cases
from common.ops.bench import decoder as size
from common.ops.bench.cases import Entry, Pass
from common.ops.bench.sweep import Sweep
from common.ops.fp8_cast.plain import E4M3
from common.ops.implementation import Implementation, OperationRequest


def case(function: Callable[..., Tensor], dtype: torch.dtype, *, rows: int, columns: int) -> list[Pass]:
    """One weight; ``dtype`` is that of the activations."""
    weight = torch.zeros(rows, columns, dtype=E4M3, device=cases.DEVICE)
    scratch = torch.empty(rows * columns, dtype=E4M3, device=cases.DEVICE)
    return [Pass("forward", lambda: function(weight, scratch), 2.0 * rows * columns)]


def _requested(implementation: Implementation, shape: tuple[int, int], batch: int, dtype: torch.dtype) -> list[Pass]:
    reason = implementation.unsupported(OperationRequest(torch.device(cases.DEVICE), E4M3))
    if reason is not None:
        raise UnsupportedImplementation(reason)
    return case(implementation.function, dtype, rows=shape[0], columns=shape[1])


def entries() -> list[Entry]:
    """Every weight of a layer in every implementation."""
    return [
        Entry(f"transpose {name} {each.name}", 0, functools.partial(_requested, each, shape))
        for name, shape in size.LINEAR.items()
        for each in transpose_fp8.IMPLEMENTATIONS.values()
    ]


def sweeps() -> dict[str, Sweep]:
    """Rows, columns and warps."""
    from common.ops.transpose_fp8 import triton

    choices = list(itertools.product((64, 128, 256), (64, 128, 256), (4, 8)))
    rows, columns = size.LINEAR["gate and up"]
    function = transpose_fp8.IMPLEMENTATIONS["triton"].function
    build = functools.partial(case, function, rows=rows, columns=columns)
    return {"transpose": Sweep(triton.TILES, "transpose", choices, build, False)}
