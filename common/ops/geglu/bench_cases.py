"""GEGLU of the feed-forward layers of a latent U-Net, with the bias of the product before."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import geglu
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.latent_unet import BATCHES, TRANSFORMERS
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import leaf, normal, size_of


def case(function: Callable[..., Tensor], packs: int, dtype: torch.dtype, *, rows: int, features: int) -> list[Pass]:
    """Both directions; the bias's gradient comes with the input's."""
    x, bias, dy = leaf(dtype, rows, 2 * features), leaf(dtype, 2 * features), normal(dtype, rows, features)
    unit = size_of(dy)
    return both_ways(lambda: function(x, bias), [x, bias], [dy], moved=(3 * unit, 5 * unit))


def entries() -> list[Entry]:
    """Every layer in every implementation."""
    found = []
    for samples, (channels, side) in itertools.product(BATCHES, TRANSFORMERS):
        build = functools.partial(case, rows=samples * side**2, features=4 * channels)
        name = f"geglu {4 * channels}@{side} n {samples}"
        found += each(name, geglu.GEGLU, "triton", {}, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """Tiles of both directions."""
    from common.ops.geglu import triton

    choices = list(itertools.product((256, 512, 1024), (1024, 2048, 4096), (4, 8), (0, 3, 4, 8), (1, 2)))
    build = functools.partial(case, geglu.GEGLU.function("triton"), 0, rows=32 * 64**2, features=1280)
    walking = [choice for choice in choices if choice[3]]
    return {
        "geglu forward": Sweep(triton.TILES, "forward", choices, build, False),
        "geglu backward": Sweep(triton.TILES, "backward", walking, build, True),
    }
