"""Cases of the suppression among the candidates of RetinaNet's five levels."""

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
    """Candidates are read once.

    Args:
        near: candidates of one class around one place, most of which overlap; it divides the candidates.
        classes: 0 where none are given.
        presorted: whether scores fall.
        absent: whether the second of the pictures lacks half of the candidates and the third all; the boxes are NaN.
        grid: what corners are rounded to, so that overlaps are often equal to the threshold; 0 for none.
    """
    places = size.boxes(draw, pictures, candidates // near, 1, side=200.0)
    boxes = (places + draw.uniform(*places.shape[:2], near, 4, high=60.0)).flatten(1, 2)
    if grid:
        boxes = (boxes / grid).round() * grid
    score = draw.rounded(draw.integers(0, 1000, pictures, candidates) / 1000)  # some are equal
    ids = None
    if classes:
        ids = draw.integers(0, classes, pictures, candidates // near, 1).expand(-1, -1, near).flatten(1)
    order = draw.permutation(candidates)  # neighbours are apart
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
