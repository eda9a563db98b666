"""Raw folders of synthetic COCO data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO

from common.detection.coco_raw import annotations_name


def annotations(folder: Path, split: str) -> COCO:
    return COCO(folder / annotations_name(split))


def changed(folder: Path, target: Path, change: Callable[[Any], object]) -> Path:
    """Return a copy of the folder with changed training annotations."""
    shutil.copytree(folder, target)
    path = target / annotations_name("train")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return target
