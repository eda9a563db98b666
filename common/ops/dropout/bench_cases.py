"""Dropout of hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import dropout
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Tensor], packs: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions."""
    x, seed = size.leaf(dtype, packs * size.LENGTH, size.HIDDEN), size.seed()
    moved = 2 * size.size_of(x)
    return both_ways(
        lambda: function(x, size.PROBABILITY, seed, size.SITE), [x], [torch.randn_like(x)], moved=(moved, moved)
    )


def entries() -> list[Entry]:
    """Every implementation; a step has it fused with what follows."""
    return each("dropout", dropout.DROPOUT, "triton", {}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """None: its kernel has a single tile."""
    return {}
