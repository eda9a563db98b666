"""The end of a sub-layer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from common.ops import dropout_add_norm
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep
from common.ops.dropout.plain import DropoutMask


def case(function: Callable[..., Any], packs: int, dtype: torch.dtype) -> list[Pass]:
    """For two readers."""
    x, residual = (size.leaf(dtype, packs * size.LENGTH, size.HIDDEN) for _ in range(2))
    bias, weight, norm_bias = (size.leaf(dtype, size.HIDDEN) for _ in range(3))
    seed = size.seed()
    unit = size.size_of(x)
    return both_ways(
        lambda: function(
            x, bias, residual, weight, norm_bias, 1e-12, DropoutMask(size.PROBABILITY, seed, size.SITE), twice=True
        ),
        [x, bias, residual, weight, norm_bias],
        [torch.randn_like(x), torch.randn_like(x)],
        moved=(3 * unit, 6 * unit),
    )


def entries() -> list[Entry]:
    """Every implementation; a layer has two."""
    sizes = {"features": size.HIDDEN}
    return each("dropout_add_norm", dropout_add_norm.IMPLEMENTATIONS, "triton", sizes, case, calls=2 * size.LAYERS)


def sweeps() -> dict[str, Sweep]:
    """Rows, warps and programs of both kernels."""
    from common.ops.dropout_add_norm import triton

    rows = list(itertools.product((1, 2, 4, 8), (2, 4, 8)))
    choices = {
        "forward": [(*tile, 0) for tile in rows],
        "backward": [(*tile, programs) for tile in rows for programs in (2, 4, 8)],
    }
    build = functools.partial(case, dropout_add_norm.IMPLEMENTATIONS["triton"].function, size.PACKS)
    return {
        f"dropout_add_norm {key}": Sweep(triton.TILES, key, tiles, build, key == "backward")
        for key, tiles in choices.items()
    }
