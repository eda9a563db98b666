"""Commands for SSD300's data: COCO 2017 as records of pictures and columns of boxes.

See :mod:`common.detection.coco_preparation`. Training pictures without a box are removed; boxes of crowds are kept.
"""

from __future__ import annotations

import numpy as np

from benchmarks.ssd300.config import BACKBONES
from benchmarks.ssd300.data import BENCHMARK, FORMAT
from benchmarks.ssd300.synthetic import generate
from common.detection.annotations import Annotations
from common.detection.coco_preparation import CocoPreparation, with_pictures


def _selected(split: str, found: Annotations) -> Annotations:
    return with_pictures(found, np.isin(found.picture_id, found.box_picture) if split == "train" else None)


def _counts(split: str, found: Annotations) -> dict[str, int]:
    return {f"{split}_boxes": len(found.box_picture)}


_COCO = CocoPreparation(BENCHMARK, FORMAT, BACKBONES, segmentations=False, select=_selected, counts=_counts)
prepare = _COCO.prepare
COMMANDS = _COCO.commands(generate, prepared="prepared records and boxes")
