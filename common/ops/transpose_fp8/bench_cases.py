"""Transposes of a decoder layer's weights, and of an encoder's inputs and gradients: 1 byte read and 1 written per
element."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import transpose_fp8
from common.ops.bench import cases, gpt3, transformer
from common.ops.bench import decoder as size
from common.ops.bench.cases import Entry, Pass, rotating
from common.ops.bench.sweep import Sweep
from common.ops.fp8_cast.reference import E4M3
from common.ops.operation import OperationRequest


def case(function: Callable[..., Tensor], dtype: torch.dtype, *, rows: int, columns: int) -> list[Pass]:
    """One matrix; ``dtype`` is that of the activations."""
    elements = rows * columns
    sets = rotating(lambda: tuple(torch.zeros(2, elements, dtype=E4M3, device=cases.DEVICE)), 2 * elements)

    def run() -> Tensor:
        matrix, scratch = next(sets)
        return function(matrix.view(rows, columns), scratch)

    return [Pass("forward", run, 2.0 * elements)]


def _requested(implementation: str, shape: tuple[int, int], batch: int, dtype: torch.dtype) -> list[Pass]:
    request = OperationRequest(torch.device(cases.DEVICE), E4M3)
    function = transpose_fp8.TRANSPOSE_FP8.select(implementation, request).function
    return case(function, dtype, rows=shape[0], columns=shape[1])


TOKENS = transformer.PACKS * transformer.LENGTH
SHAPES = (
    size.LINEAR
    | {f"x {columns}": (TOKENS, columns) for columns in (transformer.HIDDEN, 3 * transformer.HIDDEN)}
    | {f"gpt3 x {columns}": (gpt3.TOKENS, columns) for columns in (3072, 9216, 12288)}
    | {f"gpt3 w {rows}": (rows, gpt3.HIDDEN) for rows in (9216, 12288)}
)
"""Name to rows and columns."""


def entries() -> list[Entry]:
    """Every matrix in every implementation."""
    return [
        Entry(f"transpose {name} {each}", 0, functools.partial(_requested, each, shape))
        for name, shape in SHAPES.items()
        for each in transpose_fp8.TRANSPOSE_FP8.names
    ]


def sweeps() -> dict[str, Sweep]:
    """Rows, columns and warps."""
    from common.ops.transpose_fp8 import triton

    choices = list(itertools.product((64, 128, 256), (64, 128, 256), (4, 8)))
    function = transpose_fp8.TRANSPOSE_FP8.function("triton")
    found = {}
    for name in ("gate and up", f"x {transformer.HIDDEN}"):
        rows, columns = SHAPES[name]
        build = functools.partial(case, function, rows=rows, columns=columns)
        found[f"transpose {name}"] = Sweep(triton.TILES, "transpose", choices, build, False)
    return found
