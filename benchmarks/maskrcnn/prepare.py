"""Commands for Mask R-CNN's data: COCO 2017 as records of pictures and columns of their objects.

See :mod:`common.detection.coco_preparation` and, for the format, :mod:`benchmarks.maskrcnn.prepared`. Training
pictures need a box that is wider and higher than one pixel. From these pictures, crowds and boxes that are empty
inside the picture are removed. Validation data are complete.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from benchmarks.maskrcnn.caffe2_backbone import BACKBONE
from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.prepared import BENCHMARK, FORMAT, has_area, legacy_corners
from benchmarks.maskrcnn.synthetic import generate
from common.detection.annotations import Annotations
from common.detection.coco_preparation import CocoPreparation, with_pictures
from common.detection.segmentations import Segmentations
from common.errors import DataError
from common.mlperf.fixed import fixed_facts


def _selected(split: str, found: Annotations) -> Annotations:
    """Return the selected annotations by rising ids of pictures and classes. Training boxes are sorted by picture."""
    _require_sides(found)
    found = dataclasses.replace(found, class_id=np.sort(found.class_id))
    return with_pictures(found) if split == "val" else _training_annotations(found)


def _training_annotations(found: Annotations) -> Annotations:
    usable_N = np.all(found.box_xywh[:, 2:] > 1, axis=1)  # here, crowds are included
    found = with_pictures(found, np.isin(found.picture_id, found.box_picture[usable_N]))
    rows_N = np.flatnonzero(np.isin(found.box_picture, found.picture_id) & ~found.box_crowd)
    found = _with_boxes(found, rows_N)
    index_N = found.picture_indices()
    size_N2 = np.stack([found.picture_height, found.picture_width], 1)[index_N]
    rows_N = np.flatnonzero(has_area(legacy_corners(found.box_xywh, size_N2)))
    found = _with_boxes(found, rows_N[np.argsort(index_N[rows_N], kind="stable")])
    assert found.segmentations is not None
    if (runs := found.segmentations.has_runs()).any():
        raise DataError(
            f"picture {found.box_picture[runs.argmax()]} of training has an object with run lengths, which only boxes "
            "around many objects may have: 'iscrowd' 1"
        )
    polygons = found.segmentations.polygons.single_precision()
    return dataclasses.replace(found, segmentations=dataclasses.replace(found.segmentations, polygons=polygons))


def _with_boxes(found: Annotations, rows: NDArray[np.int64]) -> Annotations:
    """Return only the boxes at ``rows``, in this order."""
    assert found.segmentations is not None
    return dataclasses.replace(
        found,
        box_picture=found.box_picture[rows],
        box_class=found.box_class[rows],
        box_xywh=found.box_xywh[rows],
        box_area=found.box_area[rows],
        box_crowd=found.box_crowd[rows],
        segmentations=found.segmentations.taken(rows),
    )


def _require_sides(found: Annotations) -> None:
    """Refuse pictures that are larger than COCO's: readers have no capacity for them and cannot reduce them."""
    longest = fixed_facts(Facts, BENCHMARK).longest_side
    side_P = _sides(found)
    if len(side_P) and side_P[index := int(side_P.argmax())] > longest:
        raise DataError(
            f"picture {found.picture_id[index]} is {found.picture_width[index]} x {found.picture_height[index]} px; "
            f"COCO's pictures have {longest} px at most: it is another data set"
        )


def _sides(found: Annotations) -> NDArray[np.int64]:
    """Return the longer sides in px, (P,)."""
    return np.maximum(found.picture_height, found.picture_width)


def _counts(split: str, found: Annotations) -> dict[str, int]:
    segmentations = found.segmentations
    assert isinstance(segmentations, Segmentations)
    polygons = segmentations.polygons
    return {
        f"{split}_objects": polygons.objects,
        f"{split}_polygons": polygons.polygons,
        f"{split}_points": polygons.points,
        f"{split}_runs": len(segmentations.run_lengths),
        f"{split}_longest_side": int(_sides(found).max()),
    }


_COCO = CocoPreparation(BENCHMARK, FORMAT, (BACKBONE,), segmentations=True, select=_selected, counts=_counts)
prepare = _COCO.prepare
COMMANDS = _COCO.commands(generate, prepared="prepared records, boxes and outlines")
