"""The layer norms of a latent U-Net's transformers, each with the residual addition and the bias before it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from common.ops import add_layer_norm
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.latent_unet import BATCHES, TRANSFORMERS
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import leaf, normal, size_of


def case(function: Callable[..., Any], packs: int, dtype: torch.dtype, *, rows: int, features: int) -> list[Pass]:
    """Both directions, with both results read."""
    x, residual = leaf(dtype, rows, features), leaf(dtype, rows, features)
    weight, bias, added = (leaf(dtype, features) for _ in range(3))
    unit = size_of(x)
    return both_ways(
        lambda: function(x, residual, weight, bias, 1e-5, added_C=added),
        [x, residual, weight, bias, added],
        [normal(dtype, rows, features), normal(dtype, rows, features)],
        moved=(4 * unit, 4 * unit),
    )


def entries() -> list[Entry]:
    """Every layer in every implementation."""
    found = []
    for samples, (channels, side) in itertools.product(BATCHES, TRANSFORMERS):
        build = functools.partial(case, rows=samples * side**2, features=channels)
        sizes, name = {"features": channels}, f"add_layer_norm {channels}@{side} n {samples}"
        found += each(name, add_layer_norm.ADD_LAYER_NORM, "triton", sizes, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """Elements, warps and programs of both directions, for the widest and the narrowest rows."""
    from common.ops.add_layer_norm import triton

    function = add_layer_norm.ADD_LAYER_NORM.function("triton")
    choices = {
        "forward": list(itertools.product((1024, 2048, 4096, 8192), (2, 4, 8), (0, 8))),
        "backward": list(itertools.product((1024, 2048, 4096), (2, 4, 8), (4, 8, 12, 16))),
    }
    return {
        f"add_layer_norm {key} {channels}": Sweep(
            triton.TILES,
            key,
            tiles,
            functools.partial(case, function, 0, rows=32 * side**2, features=channels),
            key == "backward",
        )
        for key, tiles in choices.items()
        for channels, side in ((320, 64), (1280, 16))
    }
