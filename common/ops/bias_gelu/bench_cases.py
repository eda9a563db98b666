"""GELU of the feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import bias_gelu
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], packs: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions."""
    x, bias = size.leaf(dtype, packs * size.LENGTH, size.FEED_FORWARD), size.leaf(dtype, size.FEED_FORWARD)
    unit = size.size_of(x)
    return both_ways(lambda: function(x, bias), [x, bias], [torch.randn_like(x)], moved=(2 * unit, 3 * unit))


def entries() -> list[Entry]:
    """Every implementation; a layer has one."""
    sizes = {"features": size.FEED_FORWARD}
    return each("bias_gelu", bias_gelu.IMPLEMENTATIONS, "triton", sizes, case, calls=size.LAYERS)


def sweeps() -> dict[str, Sweep]:
    """Rows, columns, warps and programs of both kernels."""
    from common.ops.bias_gelu import triton

    tiles = [(4096 * scale // columns, columns) for columns in (256, 512, 1024) for scale in (1, 2)]
    choices = {
        "forward": [(*tile, warps, 0) for tile in tiles for warps in (4, 8)],
        "backward": [(*tile, warps, programs) for tile in tiles for warps in (4, 8) for programs in (2, 4, 8)],
    }
    build = functools.partial(case, bias_gelu.IMPLEMENTATIONS["triton"].function, size.PACKS)
    return {
        f"bias_gelu {key}": Sweep(triton.TILES, key, tiles, build, key == "backward") for key, tiles in choices.items()
    }
