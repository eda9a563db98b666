"""COCO's metrics, computed by pycocotools."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

NAMES = (
    *("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large"),
    *("AR_1", "AR_10", "AR_100", "AR_small", "AR_medium", "AR_large"),
)


def ground_truth(content: Path | dict[str, Any]) -> COCO:
    """Return the ground truth of a file, or of a copy of its content."""
    coco = COCO()
    coco.dataset = json.loads(content.read_bytes() if isinstance(content, Path) else json.dumps(content))
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def metrics(truth: COCO, rows: Any, kind: str = "bbox") -> dict[str, float]:
    """Return the twelve metrics of COCO's result list ``rows``."""
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(rows), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(NAMES, evaluation.stats.tolist(), strict=True))


def box_and_mask_metrics(truth: COCO, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of ``rows`` with ``bbox`` and ``segmentation``, by the names of our scorer."""
    found: dict[str, float] = {}
    for name, kind, other in (("BBOX", "bbox", "segmentation"), ("SEGM", "segm", "bbox")):
        values = metrics(truth, [{key: row[key] for key in row if key != other} for row in rows], kind)
        found |= {name if entry == "AP" else f"{name}_{entry}": value for entry, value in values.items()}
    return found


def box_metrics(truth: Path, values: dict[str, Any]) -> list[float]:
    """Return the twelve metrics of the columns of an evaluation's boxes."""
    rows = np.concatenate(
        [values["picture_id"][:, None], values["box"], values["score"][:, None], values["class_id"][:, None]], 1
    )
    return list(metrics(ground_truth(truth), rows.astype(np.float64)).values())
