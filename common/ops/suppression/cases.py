"""Cases of non-maximum suppression among the candidates of RetinaNet's five levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.sizes import detection as size


def passes(
    function: Callable[..., Any],
    draw: Draw,
    pictures: int,
    candidates: int,
    near: int,
    classes: int,
    keep: int,
    threshold: float = size.OVERLAP,
    pixel: float = 0.0,
    presorted: bool = False,
    absent: bool = False,
    grid: float = 0.0,
) -> list[Pass]:
    """Make the pass, which must read each candidate once.

    Args:
        near: candidates per cluster, a divisor of ``candidates``. A cluster has one class; most of its boxes overlap.
        classes: number of classes; 0 to pass no classes.
        keep: largest number of candidates to keep per picture.
        presorted: whether scores are in descending order.
        absent: whether the second picture lacks half of its candidates and the third lacks all. Their boxes are NaN.
        grid: corners are rounded to multiples of it, so that overlaps often equal the threshold; 0 for no rounding.
    """
    positions = size.boxes(draw, pictures, candidates // near, 1, side=200.0)
    boxes = (positions + draw.uniform(*positions.shape[:2], near, 4, high=60.0)).flatten(1, 2)
    if grid:
        boxes = (boxes / grid).round() * grid
    score = draw.rounded(draw.integers(0, 1000, pictures, candidates) / 1000)  # some are equal
    ids = None
    if classes:
        ids = draw.integers(0, classes, pictures, candidates // near, 1).expand(-1, -1, near).flatten(1)
    order = draw.permutation(candidates)  # clusters are not contiguous
    boxes, ids = boxes[:, order], ids if ids is None else ids[:, order]
    if presorted:
        score = score.sort(dim=1, descending=True).values
    if absent:
        missing = torch.zeros_like(score, dtype=torch.bool)
        missing[1, candidates // 2 :] = missing[2] = True
        score[missing], boxes[missing] = -torch.inf, torch.nan
    given = boxes, score, ids, threshold, keep, pixel, presorted
    return [Pass("forward", lambda: function(*given), size_of(boxes, score, ids))]


SMALL = {"pictures": 3, "candidates": 200, "near": 10, "classes": 3, "keep": 200}

CASES = (
    Case(
        "RetinaNet",
        passes,
        {
            "pictures": size.PICTURES,
            "candidates": size.CANDIDATES,
            "near": 20,
            "classes": size.CLASSES,
            "keep": size.DETECTIONS,
        },
        tests=[
            {**SMALL, "absent": True, "grid": 16.0},
            {**SMALL, "keep": 99, "absent": True, "grid": 16.0},
            {**SMALL, "keep": 10, "threshold": 0.45},
            {**SMALL, "classes": 0, "presorted": True, "absent": True, "pixel": 1.0},
            {**SMALL, "classes": 0, "presorted": True, "absent": True, "pixel": 1.0, "keep": 60},
            {**SMALL, "candidates": 1, "near": 1, "keep": 1},
        ],
        gpu={"pictures": 3, "keep": size.CANDIDATES, "absent": True},
        dtypes=(torch.float16, torch.float32),
        exact=True,
    ),
)
