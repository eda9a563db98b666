"""Samples of 12 pictures of 800 x 1344 px: of their anchors, and of their proposals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.maskrcnn.ops import sampling
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

ANCHORS = (268_569, 256, 128)
"""Candidates of a picture, those that are taken, and positives among them at most."""

PROPOSALS = (10_096, 512, 128)


def case(function: Callable[..., Any], batch: int, dtype: torch.dtype, *, sizes: tuple[int, int, int]) -> list[Pass]:
    """A candidate of a hundred has a box, and a third of the others is ignored."""
    candidates, count, most_positive = sizes
    part = torch.rand((batch, candidates), device=cases.DEVICE)
    label = torch.where(part < 0.01, 1, torch.where(part < 0.66, 0, -1)).to(torch.int8)
    seed = torch.zeros(1, dtype=torch.int64, device=cases.DEVICE)
    return [Pass("forward", lambda: function(label, seed, 0, count, most_positive), float(label.numel()))]


def entries() -> list[Entry]:
    """Every implementation."""
    return [
        entry
        for name, sizes in (("sampling anchors", ANCHORS), ("sampling proposals", PROPOSALS))
        for entry in each(name, sampling.SAMPLING, "triton", {}, functools.partial(case, sizes=sizes), calls=0)
    ]


def sweeps() -> dict[str, Sweep]:
    """Candidates or slots of a program, and warps."""
    from benchmarks.maskrcnn.ops.sampling import triton

    build = functools.partial(case, sampling.SAMPLING.function("triton"), 12, sizes=ANCHORS)
    rows = {"count": (512, 1024, 2048), "digit": (1,), "collect": (512, 1024, 2048), "order": (16, 32, 64)}
    return {
        f"sampling {key}": Sweep(triton.TILES, key, list(itertools.product(rows[key], (4, 8))), build, False)
        for key in triton.TILES
    }
