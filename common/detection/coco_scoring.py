"""COCO's metrics of detected boxes or masks: average precision and recall, for all pictures and classes at once.

The rules and the arithmetic are those of COCO's evaluation (Lin et al., arXiv:1405.0312;
cocodataset.org/#detection-eval):

- In each picture and class the best 100 detections, by falling score, each take one object of ground truth. It is the
  object with the largest overlap among those not yet taken that reach the threshold, and the last of equals. A crowd
  can be taken many times, and its overlap is the intersection over the detection's area.
- Crowds and objects outside a range of areas are taken only by a detection that can take no other object. Such a
  detection is neither right nor wrong, like a detection outside the range that takes nothing.
- For boxes, overlap and area are those of the boxes; for masks, those of the pixels.
- The precision of a class at a recall is the largest precision over all lists of its best detections that reach this
  recall. The average is over 101 recalls, the thresholds, and the classes that have ground truth.

On cores that other processes use too, use one thread, or threads that sleep while they wait
(``OMP_WAIT_POLICY=passive``): spinning threads take ten times as long.

Shapes: G boxes of ground truth, D detections, C detections that overlap ground truth, T thresholds, S ranges of area,
R recalls, M limits of detections, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.detection.annotations import Annotations
from common.detection.coco_matching import (
    Grouped,
    Judged,
    Matches,
    Pairs,
    box_pairs,
    match,
    portions,
    rank_of_equals,
)

THRESHOLDS: tuple[float, ...] = tuple(np.linspace(0.5, 0.95, 10).tolist())
RECALLS: tuple[float, ...] = tuple(np.linspace(0.0, 1.0, 101).tolist())
AREAS: Mapping[str, tuple[float, float]] = {
    "all": (0.0, 1e10),
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e10),
}
"""Smallest and largest area of a box, in square pixels; both are inside the range."""
LIMITS = (1, 10, 100)
"""Numbers of best detections of a picture and class that count."""

DETECTIONS_AT_ONCE = 1_500_000
"""Classes are scored in portions with at most this many detections."""


@dataclass(frozen=True)
class GroundTruth:
    """The boxes to find.

    Attributes:
        pictures: ids of all pictures, ascending, int64.
        classes: ids of all classes, ascending, int64.
        picture_id: (G,) ids of the boxes' pictures, int64.
        class_id: (G,) ids of their classes, int64.
        box: (G, 4) x, y, width, height in pixels, float64.
        area: (G,) in square pixels, compared with the ranges; in COCO the area of the outline, not of the box;
            float64.
        crowd: (G,) whether the box is around many objects, bool.
    """

    pictures: Tensor
    classes: Tensor
    picture_id: Tensor
    class_id: Tensor
    box: Tensor
    area: Tensor
    crowd: Tensor

    @staticmethod
    def of(annotations: Annotations, device: torch.device) -> GroundTruth:
        """Return the boxes of ``annotations``, on ``device``."""

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return GroundTruth(
            column(np.sort(annotations.picture_id)),
            column(np.sort(annotations.class_id)),
            column(annotations.box_picture),
            column(annotations.box_class),
            column(annotations.box_xywh),
            column(annotations.box_area),
            column(annotations.box_crowd),
        )


@dataclass(frozen=True)
class Detections:
    """Detected boxes.

    Attributes:
        picture_id: (D,) ids of pictures, int64.
        class_id: (D,) ids of classes, int64.
        box: (D, 4) x, y, width, height in pixels, float64.
        score: (D,) float64. Equal scores of a picture and class keep their order.
    """

    picture_id: Tensor
    class_id: Tensor
    box: Tensor
    score: Tensor


@dataclass(frozen=True)
class Outlines:
    """Overlaps and areas of masks, which replace those of the boxes.

    Attributes:
        pairs: detections and ground truth of one picture and class whose outlines overlap; pairs below the smallest
            of THRESHOLDS may be missing.
        area: (D,) of the detections' outlines in square pixels, float64.
    """

    pairs: Pairs
    area: Tensor


@torch.no_grad()
def score(truth: GroundTruth, found: Detections, outlines: Outlines | None = None) -> dict[str, float]:
    """Return COCO's twelve metrics for boxes, or for ``outlines`` if given. All tensors must be on one device.

    Returns:
        ``AP``, ``AP50``, ``AP75``, ``AP_small``, ``AP_medium``, ``AP_large``, ``AR_1``, ``AR_10``, ``AR_100``,
            ``AR_small``, ``AR_medium``, ``AR_large``. A metric without any ground truth is -1.

    Raises:
        ValueError: a picture or class of a box is unknown, or a score, box, area or overlap is not finite or not
            float64.
    """
    judged = [("score", found.score), ("box found", found.box), ("box", truth.box), ("area", truth.area)]
    if outlines is not None:
        judged += [("area found", outlines.area), ("overlap", outlines.pairs.overlap)]
    for name, values in judged:
        if values.dtype != torch.float64:
            raise ValueError(f"a {name} is of {values.dtype}, not of float64")
        if not bool(values.isfinite().all()):
            raise ValueError(f"a {name} is not finite")
    picture_D, class_D = _row(found.picture_id, truth.pictures, "picture"), _row(found.class_id, truth.classes, "class")
    picture_G, class_G = _row(truth.picture_id, truth.pictures, "picture"), _row(truth.class_id, truth.classes, "class")
    group_D, group_G = (
        classes * len(truth.pictures) + pictures for classes, pictures in ((class_D, picture_D), (class_G, picture_G))
    )
    # Sort by class, then by falling score, then by picture; otherwise keep the order.
    order_D = picture_D.sort(stable=True).indices
    order_D = order_D[found.score[order_D].sort(stable=True, descending=True).indices]
    order_D = order_D[class_D[order_D].sort(stable=True).indices]
    order_G = group_G.sort(stable=True).indices
    bounds_D, bounds_G = (_bounds(column, len(truth.classes)) for column in (class_D, class_G))
    area_D = found.box[:, 2] * found.box[:, 3] if outlines is None else outlines.area
    curves = _Curves()
    for first, end in portions(bounds_D, DETECTIONS_AT_ONCE):
        part_G = order_G[bounds_G[first] : bounds_G[end]]
        part_D = order_D[bounds_D[first] : bounds_D[end]]
        rank_D = rank_of_equals(group_D[part_D])
        among_best = (rank_D < LIMITS[-1]).nonzero().squeeze(1)
        part_D, rank_D = part_D[among_best], rank_D[among_best]
        crowd_G = truth.crowd[part_G]
        ignored_GS = crowd_G.unsqueeze(1) | ~_in_range(truth.area[part_G])
        if outlines is None:
            boxes, boxes_found = (
                Grouped(group_G[part_G], truth.box[part_G]),
                Grouped(group_D[part_D], found.box[part_D]),
            )
            pairs = box_pairs(boxes, crowd_G, boxes_found, THRESHOLDS[0])
        else:
            pairs = _among(outlines.pairs, _positions(part_D, len(order_D)), _positions(part_G, len(order_G)))
        matches = match(pairs, Judged(crowd_G, ignored_GS), group_D[part_D], THRESHOLDS)
        boxes_KS = torch.zeros((end - first, len(AREAS)), dtype=torch.int64, device=part_G.device)
        boxes_KS.index_add_(0, class_G[part_G] - first, (~ignored_GS).long())
        curves.add(_Part(boxes_KS, class_D[part_D] - first, rank_D, _in_range(area_D[part_D]), matches))
    return curves.figures()


def _positions(rows_N: Tensor, count: int) -> Tensor:
    """Return the position in ``rows_N`` of each of ``count`` rows; -1 if it is not there."""
    position_D = rows_N.new_full((count,), -1)
    position_D[rows_N] = torch.arange(len(rows_N), device=rows_N.device)
    return position_D


def _among(pairs: Pairs, position_D: Tensor, position_G: Tensor) -> Pairs:
    """Return the pairs whose detection and ground truth have positions, with these instead of rows."""
    detection, truth = position_D[pairs.detection], position_G[pairs.truth]
    both = ((detection >= 0) & (truth >= 0)).nonzero().squeeze(1)
    return Pairs(detection[both], truth[both], pairs.overlap[both])


@dataclass(frozen=True)
class _Part:
    """Some classes, numbered from 0, and their detections, sorted by class and falling score.

    Attributes:
        boxes: (K, S) number of ground-truth objects that count in each range of areas.
        number: (D,) number of the class.
        rank: (D,) how many detections of the same picture and class come before.
        in_range: (D, S) whether the detection's area is within a range.
    """

    boxes: Tensor
    number: Tensor
    rank: Tensor
    in_range: Tensor
    matches: Matches


class _Curves:
    """Precisions and recalls of the classes that have ground truth, by range of areas."""

    def __init__(self) -> None:
        self._precision_TR: list[list[Tensor]] = [[] for _ in AREAS]
        self._recall_MT: list[list[Tensor]] = [[] for _ in AREAS]

    def add(self, part: _Part) -> None:
        """Add some classes.

        The loop over classes has few operations, because on a GPU their launches take most of the time.
        """
        device = part.number.device
        boxes_KS = part.boxes.cpu()
        bounds_D = _bounds(part.number, len(boxes_KS))
        bounds_C = _bounds(part.number[part.matches.row], len(boxes_KS))
        # Count over all classes at once, then subtract the counts from before each class.
        in_range_SC = part.in_range[part.matches.row].T.contiguous()
        before_SD = nn.functional.pad(part.in_range.T.contiguous().cumsum(1), (1, 0))
        until_SC = before_SD[:, 1:].index_select(1, part.matches.row)
        until_SC -= before_SD[:, torch.from_numpy(bounds_D).to(device)][:, part.number[part.matches.row]]
        right_STC = part.matches.right.permute(2, 1, 0).contiguous()
        judged_STC = right_STC | (in_range_SC.unsqueeze(1) & ~part.matches.void.permute(2, 1, 0))
        judged_STC = judged_STC.long() - in_range_SC.unsqueeze(1).long()
        counted_MC = part.rank[part.matches.row] < torch.tensor(LIMITS, device=device).unsqueeze(1)
        needed_KSR = _needed(boxes_KS).to(device)
        boxes_there_KS1 = boxes_KS.clamp(min=1).unsqueeze(2).to(device)
        for number, boxes_S in enumerate(boxes_KS.tolist()):
            if not any(boxes_S):
                continue
            rows_C = slice(bounds_C[number], bounds_C[number + 1])
            right_class_STC = right_STC[:, :, rows_C]
            found_MST = (right_class_STC & counted_MC[:, None, None, rows_C]).sum(3).double()
            recall_MST = found_MST / boxes_there_KS1[number]
            judged_until_STC = judged_STC[:, :, rows_C].cumsum(2) + until_SC[:, None, rows_C]
            precision_STR = _precisions(right_class_STC, judged_until_STC, max(boxes_S), needed_KSR[number])
            for area, boxes in enumerate(boxes_S):
                if boxes:
                    self._recall_MT[area].append(recall_MST[:, area])
                    self._precision_TR[area].append(precision_STR[area])

    def figures(self) -> dict[str, float]:
        """Return the averages over the classes, as in :func:`score`."""
        area = {name: number for number, name in enumerate(AREAS)}

        def precision(name: str, thresholds: slice = slice(None)) -> float:
            return _mean([values_TR[thresholds] for values_TR in self._precision_TR[area[name]]])

        def recall(name: str, limit: int) -> float:
            return _mean([values_MT[LIMITS.index(limit)] for values_MT in self._recall_MT[area[name]]])

        return {
            "AP": precision("all"),
            **{f"AP{at}": precision("all", _only(at / 100)) for at in (50, 75)},
            **{f"AP_{name}": precision(name) for name in list(AREAS)[1:]},
            **{f"AR_{limit}": recall("all", limit) for limit in LIMITS},
            **{f"AR_{name}": recall(name, LIMITS[-1]) for name in list(AREAS)[1:]},
        }


def _precisions(right_STC: Tensor, judged_until_STC: Tensor, boxes: int, needed_SR: Tensor) -> Tensor:
    """Return the precision at each recall, (S, T, R).

    Precision rises only at a right detection, so all others can be left out.

    Args:
        right_STC: whether a detection is right; sorted by falling score.
        judged_until_STC: number of right or wrong detections up to this one, including it.
        boxes: largest number of objects to find in any range.
        needed_SR: number of objects to find for each recall.
    """
    found_STC = right_STC.long().cumsum(2)
    spacing = torch.finfo(torch.float64).eps
    precision_STC = torch.where(right_STC, found_STC.double() / (judged_until_STC.double() + spacing), 0.0)
    precision_STC = precision_STC.flip(2).cummax(2).values.flip(2)
    # Index precisions by the number of objects found. Entry 0 is for detections that are not right, and is not read.
    by_found = precision_STC.new_zeros((*precision_STC.shape[:2], boxes + 1))
    by_found.scatter_(2, torch.where(right_STC, found_STC, 0), precision_STC)
    return by_found.gather(2, needed_SR.unsqueeze(1).expand(-1, by_found.shape[1], -1))


def _needed(boxes_KS: Tensor) -> Tensor:
    """Return how many of ``boxes`` must be found for each recall, (K, S, R).

    At least one, because without any detection the precision is 0. Without boxes it is also one, which is not read.
    """
    recall_R1 = torch.tensor(RECALLS, dtype=torch.float64).unsqueeze(1)
    boxes_KS11 = boxes_KS[..., None, None]
    near = (recall_R1 * boxes_KS11).floor().long() + torch.arange(-1, 3)
    reached = near.double() / boxes_KS11.clamp(min=1) >= recall_R1
    return torch.where(reached, near, boxes_KS11).amin(3).clamp(min=1)


def _only(threshold: float) -> slice:
    index = THRESHOLDS.index(threshold)
    return slice(index, index + 1)


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean()) if values else -1.0


def _in_range(area_D: Tensor) -> Tensor:
    """Return whether each area is within each range, (D, S)."""
    least_S, most_S = torch.tensor(list(AREAS.values()), dtype=torch.float64, device=area_D.device).unbind(1)
    return (area_D.unsqueeze(1) >= least_S) & (area_D.unsqueeze(1) <= most_S)


def _row(ids_D: Tensor, known: Tensor, name: str) -> Tensor:
    """Return the position of each id in ``known``, which is ascending."""
    row_D = torch.searchsorted(known, ids_D.contiguous())
    unknown_D = row_D == len(known)
    if len(known):
        unknown_D = known[row_D.clamp(max=len(known) - 1)] != ids_D
    if bool(unknown_D.any()):
        raise ValueError(f"a box is of {name} {int(ids_D[unknown_D][0])}, which is not known")
    return row_D


def _bounds(number_D: Tensor, count: int) -> NDArray[np.int64]:
    """Return the start of the entries of each number below ``count`` once sorted, then the end of the last."""
    ends: NDArray[np.int64] = number_D.bincount(minlength=count).cumsum(0).cpu().numpy()
    return np.concatenate([np.zeros(1, np.int64), ends])
