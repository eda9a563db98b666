"""Casts to FP8 with their transpose: 2 bytes read, 1 + 1 written per element."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from common.ops import fp8_cast
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, each, rotating
from common.ops.bench.sweep import Sweep
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor


def case(
    function: Callable[..., Fp8Tensor],
    packs: int,
    dtype: torch.dtype,
    *,
    columns: int,
    rows: int | None = None,
    to: torch.dtype = E4M3,
) -> list[Pass]:
    """One cast; of activations or gradients, as many rows as tokens, unless told otherwise."""
    rows = packs * size.LENGTH if rows is None else rows
    read = rows * columns * dtype.itemsize
    sets = rotating(lambda: (size.normal(dtype, rows, columns), size.fresh_scaling()), read)
    return [Pass("forward", lambda: function(*next(sets), to, True), read + 2.0 * rows * columns)]


def entries() -> list[Entry]:
    """Whatever is cast in an encoder layer, equal casts once."""
    builds: dict[str, Callable[..., list[Pass]]] = {}
    for columns, rows in size.LINEAR.values():
        builds[f"x {columns}"] = functools.partial(case, columns=columns)
        builds[f"w {rows} x {columns}"] = functools.partial(case, columns=columns, rows=rows)
        builds[f"dy {rows}"] = functools.partial(case, columns=rows, to=E5M2)
    return [
        entry
        for what, build in builds.items()
        for entry in each(f"cast {what}", fp8_cast.FP8_CAST, "triton", {}, build, calls=0)
    ]


def sweeps() -> dict[str, Sweep]:
    """Rows, columns, warps, programs and stages."""
    from common.ops.fp8_cast import triton

    sizes = ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256))
    choices = list(itertools.product(sizes, (4, 8), (1, 2, 3, 4, 6), (1, 2, 3)))
    tiles: list[tuple[int, ...]] = [(*shape, *rest) for shape, *rest in choices]
    function = fp8_cast.FP8_CAST.function("triton")
    return {
        f"cast {columns} to {to}": Sweep(
            triton.TILES, "cast", tiles, functools.partial(case, function, size.PACKS, columns=columns, to=to), False
        )
        for columns, to in ((1024, E4M3), (4096, E4M3), (3072, E5M2))
    }
