"""Synthetic pictures with outlined objects and crowds, and detected masks near them, in COCO's format and in ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from common.contract.evaluation import Predictions
from common.detection.annotations import Annotations, read_coco

SIZES = ((150, 200), (200, 150), (97, 131))
"""Height and width of the pictures, by turns."""


@dataclass(frozen=True)
class SyntheticMasks:
    """Ground truth as JSON's content, and detections as COCO's results and as an evaluation's columns."""

    dataset: dict[str, Any]
    results: list[dict[str, Any]]
    predictions: Predictions


def runs_of(bitmap_HW: np.ndarray) -> list[int]:
    """Lengths of pixels outside and inside by turns, column by column, beginning outside."""
    runs, inside = [0], 0
    for pixel in bitmap_HW.T.ravel().tolist():
        if pixel != inside:
            runs.append(0)
            inside = pixel
        runs[-1] += 1
    return runs


def outline(chance: np.random.Generator, centre: np.ndarray, radius: np.ndarray) -> list[float]:
    """A polygon of a few corners around ``centre``, as long a list as COCO has it."""
    corners = int(chance.integers(3, 12))
    turn = np.sort(chance.uniform(0, 2 * np.pi, corners))
    points = centre + radius * np.stack([np.cos(turn), np.sin(turn)], 1) * chance.uniform(0.7, 1, (corners, 1))
    made: list[float] = points.round(2).ravel().tolist()
    return made


def synthetic(
    seed: int, pictures: int = 5, classes: int = 3, objects: int = 30, found: int = 90, decimals: int = 1
) -> SyntheticMasks:
    """Random objects, one in ten a crowd, and detections most of which are moved objects; few decimals make ties."""
    chance = np.random.default_rng(seed)
    picture_ids = sorted(chance.choice(10_000, pictures, replace=False).tolist())
    class_ids = sorted(chance.choice(90, classes, replace=False).tolist())
    size = {number: SIZES[index % len(SIZES)] for index, number in enumerate(picture_ids)}
    annotations: list[dict[str, Any]] = []
    for number in range(1, objects + 1):
        picture, kind = chance.choice(picture_ids[: max(1, pictures - 1)]), chance.choice(class_ids)
        height, width = size[int(picture)]
        centre, radius = chance.uniform(0, 1, 2) * (width, height), np.exp(chance.uniform(1.5, 4.5, 2))
        parts: Any = [outline(chance, centre, radius) for _ in range(int(chance.integers(1, 4)))]
        mask = coco_mask.merge(coco_mask.frPyObjects(parts, height, width))
        crowd = number % 10 == 0
        if crowd:
            parts = {"size": [height, width], "counts": runs_of(coco_mask.decode(mask))}
        annotations.append(
            {
                "id": number,
                "image_id": int(picture),
                "category_id": int(kind),
                "segmentation": parts,
                "bbox": coco_mask.toBbox(mask).round(1).tolist(),
                "area": float(coco_mask.area(mask)) * float(chance.uniform(0.6, 1.2)),
                "iscrowd": int(crowd),
            }
        )
    results, runs = [], []
    for _ in range(found):
        near = annotations[int(chance.integers(objects))]
        elsewhere = chance.random() < 0.2
        picture = int(chance.choice(picture_ids)) if elsewhere else near["image_id"]
        kind = int(chance.choice(class_ids)) if elsewhere else near["category_id"]
        height, width = size[picture]
        if elsewhere or isinstance(near["segmentation"], dict):
            parts = [outline(chance, chance.uniform(0, 1, 2) * (width, height), np.exp(chance.uniform(1, 5, 2)))]
        else:
            shift = np.tile(chance.normal(0, 2, 2), 100)
            parts = [(np.array(part) + shift[: len(part)]).tolist() for part in near["segmentation"]]
        mask = coco_mask.merge(coco_mask.frPyObjects(parts, height, width))
        x, y, w, h = coco_mask.toBbox(mask)
        box = np.array([x + chance.normal(), y + chance.normal(), w + 1, h + 1], np.float32)
        score = np.float32(round(float(chance.random()), decimals))
        results.append(
            {
                "image_id": picture,
                "category_id": kind,
                "segmentation": mask,
                "bbox": box.astype(np.float64).tolist(),
                "score": float(score),
            }
        )
        runs.append(runs_of(coco_mask.decode(mask)))
    dataset = {
        "images": [{"id": number, "height": size[number][0], "width": size[number][1]} for number in picture_ids],
        "categories": [{"id": number} for number in class_ids],
        "annotations": annotations,
    }
    columns = {
        "pictures": np.array(picture_ids),
        "picture_id": np.array([row["image_id"] for row in results], np.int64),
        "class_id": np.array([row["category_id"] for row in results], np.int64),
        "box": np.array([row["bbox"] for row in results], np.float32).reshape(-1, 4),
        "score": np.array([row["score"] for row in results], np.float32),
        "run_count": np.array([len(each) for each in runs], np.int32),
        "runs": np.array([run for each in runs for run in each], np.int32),
    }
    return SyntheticMasks(dataset, results, Predictions(columns))


def read_annotations(root: Any) -> Annotations:
    """The ground truth that a test has written into ``root``; a function of a module, as scorers want it."""
    return read_coco(root / "objects.json", segmentations=True)
