"""Synthetic drawn pictures in COCO's raw layout, so that preparation and reading run the real code.

Ids of pictures and categories have gaps, as in COCO. Objects have polygons, crowds have run lengths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from common.data import synthetic
from common.data.options import Option, Options
from common.detection.coco_raw import SPLITS, annotations_name
from common.detection.drawn_pictures import LOOKS, DrawnBox, DrawnPicture, PicturePlan, draw, outlines, shape_of

PER_WORKER = 128
"""Number of pictures that are worth a process."""
SLIVER = (1.0, 7.0)
"""Width and height, px, of a box that is empty in COCO's older arithmetic."""


@dataclass(frozen=True)
class SyntheticCoco(Options):
    """Options of ``generate`` that workloads share. Crowds and tiny objects are drawn besides ``boxes``."""

    train: Annotated[int, Option("number of training pictures with objects", least=1)] = 2000
    eval: Annotated[int, Option("number of validation pictures", least=1)] = 200
    classes: Annotated[int, Option("number of classes", least=1, most=LOOKS)] = 80
    sides: Annotated[tuple[int, int], Option("smallest and largest picture side, px")] = (300, 640)
    boxes: Annotated[int, Option("largest number of objects in a picture")] = 8
    width: Annotated[int, Option("channels of the backbone's first convolution")] = 64
    image_size: Annotated[int, Option("side of pictures to fit the backbone to, px")] = 800
    seed: int = 0


def generate(
    raw_dir: Path,
    options: SyntheticCoco,
    plans: dict[str, list[PicturePlan]],
    workers: int,
    write_backbone: Callable[[Path, list[Path]], None],
    slivers: Collection[int] = (),
) -> str:
    """Write synthetic data in the format of COCO 2017 to ``raw_dir``, an empty or new folder; return a summary.

    Args:
        options: description that is stored with the data.
        plans: plans of pictures by split, ``train`` and ``val``.
        write_backbone: writes the backbone to the given folder, for the given training pictures.
        slivers: numbers of pictures that have an additional box one pixel wide.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    summary = []
    with synthetic.generated(raw_dir) as folder:
        (folder / "annotations").mkdir()
        for split, wanted in plans.items():
            drawn = synthetic.drawn(draw, wanted, workers, PER_WORKER)
            boxes = _write_split(folder, split, zip(wanted, drawn, strict=True), options.classes, slivers)
            summary.append(f"{split}: {len(wanted)} pictures with {boxes} boxes")
        write_backbone(folder, sorted((folder / SPLITS["train"]).iterdir()))
        synthetic.mark(folder, asdict(options))
    return "; ".join(summary)


def category_ids(classes: int) -> list[int]:
    """Return the ids of ``classes`` categories, with gaps."""
    return [number for number in range(1, 2 * classes + 1) if number % 3 != 2][:classes]


def picture_id(number: int) -> int:
    """Return the id of the picture with this number; ids have gaps."""
    return 9 + 7 * number


def _write_split(
    raw_dir: Path,
    split: str,
    drawn: Iterable[tuple[PicturePlan, DrawnPicture]],
    classes: int,
    slivers: Collection[int],
) -> int:
    """Write the pictures of a split and their annotations; return the number of boxes."""
    folder, ids = raw_dir / SPLITS[split], category_ids(classes)
    folder.mkdir()
    images: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    for plan, picture in drawn:
        name = f"{picture_id(plan.number):012d}.jpg"
        (folder / name).write_bytes(picture.jpeg)
        images.append(
            {"id": picture_id(plan.number), "file_name": name, "width": picture.width, "height": picture.height}
        )
        for values in _annotations(plan, picture, plan.number in slivers):
            category = ids[values.pop("class_index")]
            boxes.append({"id": len(boxes) + 1, "image_id": picture_id(plan.number), "category_id": category, **values})
    categories = [{"id": number, "name": f"shape {index}"} for index, number in enumerate(ids)]
    content = {"info": {}, "images": images, "annotations": boxes, "categories": categories}
    (raw_dir / annotations_name(split)).write_text(json.dumps(content), encoding="utf-8")
    return len(boxes)


def _annotations(plan: PicturePlan, picture: DrawnPicture, sliver: bool) -> Iterator[dict[str, Any]]:
    """Yield the annotations of one picture, with ``class_index`` in place of their category."""
    for box in picture.boxes:
        values = {"class_index": box.class_index, "bbox": [box.x, box.y, box.width, box.height]}
        if box.crowd:
            inside_HW = _inside(box, picture)
            runs = {"size": [picture.height, picture.width], "counts": run_lengths(inside_HW)}
            yield {**values, "area": int(inside_HW.sum()), "iscrowd": 1, "segmentation": runs}
        else:
            parts = outlines(box.class_index, box.height, box.width)
            corner = np.array([box.x, box.y])
            polygons = [np.round(part_S2 + corner, 2).reshape(-1).tolist() for part_S2 in parts]
            area = int(shape_of(box.class_index, box.height, box.width).sum())
            yield {**values, "area": area, "iscrowd": 0, "segmentation": polygons}
    if sliver:
        x, y, (width, height) = picture.width // 2, picture.height // 3, SLIVER
        yield {
            "class_index": plan.classes[0],
            "bbox": [x, y, width, height],
            "area": width * height / 2,
            "iscrowd": 0,
            "segmentation": [[x, y, x + width, y, x, y + height]],
        }


def _inside(box: DrawnBox, picture: DrawnPicture) -> NDArray[np.bool_]:
    """Return a mask (H, W) of the pixels that the members of a crowd cover."""
    inside_HW = np.zeros((picture.height, picture.width), np.bool_)
    for one in box.members:
        part_HW = inside_HW[one.y : one.y + one.height, one.x : one.x + one.width]
        part_HW |= shape_of(one.class_index, one.height, one.width)
    return inside_HW


def run_lengths(inside_HW: NDArray[np.bool_]) -> list[int]:
    """Return lengths of runs of pixels alternately outside and inside, column by column, beginning outside."""
    columns = np.concatenate([[False], inside_HW.T.reshape(-1)])
    changes = np.flatnonzero(columns[1:] != columns[:-1])
    found: list[int] = np.diff(np.concatenate([[0], changes, [inside_HW.size]])).tolist()
    return found
