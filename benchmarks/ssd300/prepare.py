"""Commands for SSD300's data: COCO 2017 as records of pictures and columns of boxes.

See :mod:`common.detection.coco_preparation`. Training pictures without a box are removed; boxes of crowds are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ssd300.config import BACKBONES
from benchmarks.ssd300.data import BENCHMARK, FORMAT
from benchmarks.ssd300.stand_in import Request, generate
from common.data.commands import TRUST, DataCommands, cores, option
from common.detection.annotations import Annotations
from common.detection.coco_preparation import PUBLISHED, CocoPreparation, with_pictures
from common.detection.coco_stand_in import Generated


def _selected(split: str, found: Annotations) -> Annotations:
    return with_pictures(found, np.isin(found.picture_id, found.box_picture) if split == "train" else None)


def _counts(split: str, found: Annotations) -> dict[str, int]:
    return {f"{split}_boxes": len(found.box_picture)}


_COCO = CocoPreparation(BENCHMARK, FORMAT, BACKBONES, segmentations=False, select=_selected, counts=_counts)
prepare, verify = _COCO.prepare, _COCO.verify


def _generate(raw_dir: Path, workers: int, **sizes: Any) -> Generated:
    return generate(raw_dir, Request(**{name: _tuple(value) for name, value in sizes.items()}), workers)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_DEFAULTS = Request()

COMMANDS = DataCommands(
    BENCHMARK,
    raw="COCO's archives, or what is in them",
    prepared="prepared records and boxes",
    real="COCO 2017",
    generate=_generate,
    prepare=prepare,
    verify=verify,
    workers={"prepare": cores, "generate": cores},
    options={
        "prepare": (option("--assets-dir", type=Path, help="where the backbone goes (default: DATA-assets)"), TRUST),
        "generate": (
            option("--train", type=int, default=_DEFAULTS.train, help="training pictures with a box"),
            option("--eval", type=int, default=_DEFAULTS.eval, help="validation pictures"),
            option("--classes", type=int, default=_DEFAULTS.classes),
            option("--sides", type=int, nargs=2, default=_DEFAULTS.sides, help="least and largest, px"),
            option("--boxes", type=int, default=_DEFAULTS.boxes, help="objects of a picture at most"),
            option("--width", type=int, default=_DEFAULTS.width, help="channels of the backbone's first convolution"),
            option("--layers", type=int, nargs=3, default=_DEFAULTS.layers, help="blocks of its stages"),
            option("--image-size", type=int, default=_DEFAULTS.image_size, help="px, of what the backbone sees"),
            option("--seed", type=int, default=0),
        ),
    },
    remarks=_COCO.remarks,
    published=PUBLISHED,
)
