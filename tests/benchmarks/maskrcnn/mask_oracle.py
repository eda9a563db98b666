"""Masks by pycocotools: targets drawn from outlines step by step, and detections' masks pasted into whole pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pycocotools import mask as coco
from torch import Tensor
from torch.nn import functional

from benchmarks.maskrcnn.ops.paste import MaskRuns, Masks
from benchmarks.maskrcnn.polygon_table import PolygonCapacity, PolygonTable
from common.detection.polygons import Polygons

Outline = Sequence[np.ndarray]
"""Parts of an object, each (points, 2) float32."""


def columns(objects: Sequence[Outline]) -> Polygons:
    """The outlines as a table of polygons."""
    parts = [part for outline in objects for part in outline]
    object_bounds = np.cumsum([0, *(len(outline) for outline in objects)])
    polygon_bounds = np.cumsum([0, *(len(part) for part in parts)])
    xy = np.concatenate([np.zeros((0, 2)), *parts])
    return Polygons(object_bounds.astype(np.int32), polygon_bounds.astype(np.int32), xy.astype(np.float32))


class Targets(NamedTuple):
    """A case of mask targets: outlines, and RoIs with an object of them each."""

    objects: Sequence[Outline]
    object: Tensor
    boxes: Tensor
    transform: Tensor

    def table(self, device: str = "cpu") -> PolygonTable:
        """With more capacity than is needed."""
        polygons = columns(self.objects)
        capacity = PolygonCapacity(len(self.objects) + 3, len(polygons.polygon_bounds) + 2, len(polygons.xy) + 40)
        table = PolygonTable(capacity, torch.device(device))
        table.load(polygons)
        return table


def expected_targets(case: Targets, size: int) -> Tensor:
    """Scaled, mirrored, cut and scaled again in fp32, then drawn by pycocotools in float64."""
    found = torch.zeros((len(case.object), size, size), dtype=torch.uint8)
    for roi, number in enumerate(case.object.tolist()):
        if number < 0:
            continue
        scale_x, scale_y, mirrored, width = case.transform[roi].tolist()
        box = case.boxes[roi].numpy()
        extent = np.maximum(box[2:] - box[:2], np.float32(1))
        parts = []
        for part in case.objects[number]:
            moved = torch.from_numpy(part.astype(np.float32)) * torch.tensor([scale_x, scale_y])
            if mirrored:
                moved[:, 0] = round(width * scale_x) - moved[:, 0] - 1
            moved = moved - case.boxes[roi, :2]
            moved[:, 0] *= float(size) / float(extent[0])
            moved[:, 1] *= float(size) / float(extent[1])
            parts.append(moved.flatten().double().numpy())
        if parts:
            drawn = coco.decode(coco.merge(coco.frPyObjects(parts, size, size)))
            found[roi] = torch.from_numpy(drawn)
    return found


def random_targets(seed: int, rois: int, most_points: int = 12) -> Targets:
    """Objects of one to four parts, on whole and on fractional px, in RoIs that hold them, cut them or miss them."""
    random = np.random.default_rng(seed)
    objects = []
    for _ in range(rois):
        parts = []
        for _ in range(random.integers(1, 5)):
            middle, spread = random.uniform(-20, 660, 2), random.choice([0.4, 5.0, 60.0, 300.0])
            part = middle + random.normal(0, spread, (random.integers(3, most_points), 2))
            parts.append((part.round() if random.random() < 0.3 else part.round(2)).astype(np.float32))
        objects.append(parts)
    number = np.where(random.random(rois) < 0.1, -1, random.permutation(rois))
    width = random.integers(200, 641, rois)
    scale = np.stack([random.integers(400, 1334, rois) / width, random.uniform(1.2, 2.1, rois)], 1)
    mirrored = random.integers(0, 2, rois)
    boxes = np.empty((rois, 4))
    for roi, own in enumerate(number):
        points = np.concatenate(objects[own]) * scale[roi]
        if mirrored[roi]:
            points[:, 0] = np.round(width[roi] * scale[roi, 0]) - points[:, 0] - 1
        low, high = points.min(0), points.max(0)
        change = random.choice([0.0, 0.1, 1.0]) * (high - low)
        boxes[roi, :2] = low + random.normal(0, 1, 2) * change
        boxes[roi, 2:] = np.maximum(boxes[roi, :2], high + random.normal(0, 1, 2) * change)
        if random.random() < 0.3:
            boxes[roi] = boxes[roi].round()
    transform = np.column_stack([scale, mirrored, width])
    return Targets(
        objects, torch.from_numpy(number), torch.from_numpy(boxes).float(), torch.from_numpy(transform).float()
    )


def pasted(masks: Masks, index: int, threshold: float) -> np.ndarray:
    """The mask of one detection in its whole picture, (height, width) uint8, by PyTorch's interpolation.

    Fails where a pixel is so near the threshold that it depends on how PyTorch rounds.
    """
    size = masks.probability_DSS.shape[1]
    padded = functional.pad(masks.probability_DSS[index].float(), (1, 1, 1, 1))
    box = masks.boxes_D4[index].cpu()
    half, middle = (box[2:] - box[:2]) * 0.5, (box[2:] + box[:2]) * 0.5
    half *= (size + 2) / size
    (x1, y1), (x2, y2) = ((middle + sign * half).int().tolist() for sign in (-1, 1))
    wide, high = max(x2 - x1 + 1, 1), max(y2 - y1 + 1, 1)
    drawn = functional.interpolate(padded.cpu()[None, None], (high, wide), mode="bilinear", align_corners=False)[0, 0]
    assert (drawn - threshold).abs().min() > 5e-7
    height, width = masks.size_D2[index].int().tolist()
    picture = np.zeros((height, width), np.uint8)
    left, right, top, bottom = max(x1, 0), min(x2 + 1, width), max(y1, 0), min(y2 + 1, height)
    if left < right and top < bottom:
        picture[top:bottom, left:right] = (drawn > threshold)[top - y1 : bottom - y1, left - x1 : right - x1]
    return picture


def codes(found: MaskRuns, masks: Masks) -> list[dict[str, Any] | None]:
    """COCO's compressed codes of run-lengths; None where a slot has no run."""
    made: list[dict[str, Any] | None] = []
    parts = found.runs_T.cpu().split(found.counts_D.tolist())
    for runs, (height, width) in zip(parts, masks.size_D2.int().tolist(), strict=True):
        own = {"size": [height, width], "counts": runs.tolist()}
        made.append(coco.frPyObjects([own], height, width)[0] if len(runs) else None)
    return made


def random_masks(seed: int, detections: int, most: int = 60) -> Masks:
    """Blobs in boxes that lie within small pictures, reach over their borders, cover them or miss them."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random)

    rough = 8 * torch.randn((detections, 1, 7, 7), generator=random) + 4 * uniform(detections, 1, 1, 1)
    smooth = functional.interpolate(rough, (28, 28), mode="bicubic")[:, 0]
    size = (1 + uniform(detections, 2) * most).floor()
    corner = (uniform(detections, 2) * 1.4 - 0.3) * size.flip(1)
    boxes = torch.cat([corner, corner + uniform(detections, 2) ** 2 * 1.5 * size.flip(1)], 1)
    whole = uniform(detections) < 0.2
    boxes[whole] = torch.cat([torch.zeros_like(size), size.flip(1) - 1], 1)[whole]  # columns follow without zeros
    whole_rows = uniform(detections) < 0.2
    boxes[whole_rows, 1], boxes[whole_rows, 3] = 0.0, size[whole_rows, 0] - 1
    probability = smooth.sigmoid().clamp(max=0.998)  # one beside the border gives exactly a half in boxes of 14 px
    return Masks(probability, boxes, size, torch.ones(detections, dtype=torch.bool))
