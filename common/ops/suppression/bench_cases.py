"""Suppression among the candidates of RetinaNet's five levels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from common.ops import suppression
from common.ops.bench import cases
from common.ops.bench import detection as size
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

NEAR = 20
"""Candidates around one place, most of which suppress each other."""


def case(function: Callable[..., Any], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Candidates in groups of one class; boxes and scores are fp32 whatever the dtype."""
    pictures, groups = size.PICTURES, size.CANDIDATES // NEAR
    boxes = size.boxes(pictures, groups, 1, side=200.0) + 20 * torch.rand(
        (pictures, groups, NEAR, 4), device=cases.DEVICE
    )
    classes = torch.randint(size.CLASSES, (pictures, groups, 1), device=cases.DEVICE).expand(-1, -1, NEAR)
    found = boxes.flatten(1, 2), torch.rand((pictures, size.CANDIDATES), device=cases.DEVICE), classes.flatten(1)
    moved = float(sum(tensor.numel() * tensor.element_size() for tensor in found))
    return [Pass("forward", lambda: function(*found, size.OVERLAP, size.DETECTIONS), moved)]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("suppression", suppression.SUPPRESSION, "triton", {}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """Candidates at a time and warps."""
    from common.ops.suppression import triton

    tiles = list(itertools.product((32, 64), (4, 8, 16)))
    build = functools.partial(case, suppression.SUPPRESSION.function("triton"), size.PICTURES)
    return {"suppression": Sweep(triton.TILES, "suppress", tiles, build, False)}
