"""The end of a sub-layer, between products in 16 bits and between products in FP8."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops import dropout_add_norm
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling


def case(function: Callable[..., Any], packs: int, dtype: torch.dtype) -> list[Pass]:
    """For two readers."""
    return _both_ways(function, packs, dtype, None, None, (3.0, 6.0))


def fp8_case(function: Callable[..., Any], packs: int, dtype: torch.dtype) -> list[Pass]:
    """The same with a result in FP8 more, and the gradient for the product in FP8."""
    moved = (3.0 + 1 / dtype.itemsize, 5.0 + 1 / dtype.itemsize)
    return _both_ways(function, packs, dtype, size.fresh_scaling(), Handover(size.fresh_scaling()), moved)


def _both_ways(
    function: Callable[..., Any],
    packs: int,
    dtype: torch.dtype,
    fp8: Scaling | None,
    handover: Handover | None,
    moved: tuple[float, float],
) -> list[Pass]:
    """``moved`` in units of the input."""
    x, residual = (size.leaf(dtype, packs * size.LENGTH, size.HIDDEN) for _ in range(2))
    bias, weight, norm_bias = (size.leaf(dtype, size.HIDDEN) for _ in range(3))
    seed = size.seed()
    unit = size.size_of(x)

    def run() -> tuple[Tensor, Tensor]:
        mask = DropoutMask(size.PROBABILITY, seed, size.SITE)
        given = (x, bias, residual, weight, norm_bias, 1e-12, mask)
        first, second = function(*given, twice=True, fp8=fp8, handover=handover)
        return first.source if isinstance(first, Fp8Tensor) else first, second

    return both_ways(
        run,
        [x, bias, residual, weight, norm_bias],
        [torch.randn_like(x), torch.randn_like(x)],
        moved=(moved[0] * unit, moved[1] * unit),
    )


def entries() -> list[Entry]:
    """Every implementation; a layer has two."""
    sizes = {"features": size.HIDDEN}
    implementations = dropout_add_norm.DROPOUT_ADD_NORM
    return [
        *each("dropout_add_norm", implementations, "triton", sizes, case, calls=2 * size.LAYERS),
        *each("dropout_add_norm to fp8", implementations, "triton", sizes, fp8_case, calls=0),
    ]


def sweeps() -> dict[str, Sweep]:
    """Rows, warps and programs of both kernels."""
    from common.ops.dropout_add_norm import triton

    rows = list(itertools.product((1, 2, 4, 8), (2, 4, 8)))
    choices = {
        "forward": [(*tile, 0) for tile in rows],
        "backward": [(*tile, programs) for tile in rows for programs in (2, 4, 8)],
        "forward to fp8": [
            (*tile, programs) for tile in ((1, 2), (1, 4), (2, 8), (4, 8)) for programs in (2, 4, 8, 16)
        ],
        "backward to fp8": [
            (*tile, programs) for tile in ((1, 2), (1, 4), (1, 8), (2, 4)) for programs in (4, 5, 8, 10)
        ],
    }
    function = dropout_add_norm.DROPOUT_ADD_NORM.function("triton")
    build, build_fp8 = (functools.partial(which, function, size.PACKS) for which in (case, fp8_case))
    return {
        f"dropout_add_norm {key}": Sweep(
            triton.TILES, key, tiles, build_fp8 if key.endswith("fp8") else build, key.startswith("backward")
        )
        for key, tiles in choices.items()
    }
