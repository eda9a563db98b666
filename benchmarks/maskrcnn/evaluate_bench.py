"""Pictures per second of Mask R-CNN's evaluation on a GPU: ``python -m benchmarks.maskrcnn.evaluate_bench``.

Pictures are noise on the device, 4,096 of them, and the heads random: what is timed is resizing, forward passes,
proposals, suppression and the masks of all detections, captured as in a run; then pasting, run lengths and gathering;
and, apart, both scores, against objects that stand where some detections are, with a process for every core. Arguments
are overrides, such as ``precision=bf16`` or ``reader.eval_batch=8``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.maskrcnn.evaluate import example_size
from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from common.contract.evaluation import Predictions
from common.contract.workload import Workload
from common.detection import evaluation_bench
from common.detection.annotations import Annotations
from common.detection.mask_scorer import MaskScorer
from common.detection.polygons import Polygons
from common.detection.segmentations import Segmentations

OBJECTS = 7
"""Of a picture at most: as many as a picture of COCO has on average."""


def scored(workload: Workload, predictions: Predictions) -> str:
    """What scoring the predictions takes, in words."""
    assert isinstance(workload, MaskRCNNSegmentation)
    truth, cores = near_detections(workload, predictions), len(os.sched_getaffinity(0))
    scorer = MaskScorer(lambda root: truth, torch.device("cpu"), cores)
    began = time.perf_counter()
    scorer.open_data(Path())
    scorer.score(predictions)  # waits until all processes have the ground truth
    opened = time.perf_counter()
    figures = scorer.score(predictions)
    seconds = time.perf_counter() - opened
    scorer.close()
    values = predictions.values
    found, runs = len(values["score"]), len(values["runs"])
    return (
        f"{found:,} detections of {runs:,} runs scored in {seconds:.3f} s by {cores} processes, the first time in "
        f"{opened - began:.3f} s: BBOX {figures['BBOX']:.4f}, SEGM {figures['SEGM']:.4f}"
    )


def near_detections(workload: MaskRCNNSegmentation, predictions: Predictions) -> Annotations:
    """Ground truth where some detections of each made-up picture are; objects are rectangles."""
    own, values = workload.own, predictions.values
    chosen_N = _some(values["picture_id"], OBJECTS)
    ids_P = np.sort(values["pictures"])
    turn_P = ids_P // own.reader.eval_batch % len(own.reader.shapes)
    size_P2 = np.array([example_size(own.facts, shape) for shape in own.reader.shapes])[turn_P]
    box_N4 = values["box"][chosen_N].astype(np.float64)
    x, y, width, height = box_N4.T
    corners_N42 = np.stack([x, y, x + width, y, x + width, y + height, x, y + height], 1).reshape(-1, 2)
    objects = len(chosen_N)
    polygons = Polygons(np.arange(objects + 1, dtype=np.int32), np.arange(objects + 1, dtype=np.int32) * 4, corners_N42)
    return Annotations(
        ids_P,
        size_P2[:, 0],
        size_P2[:, 1],
        np.arange(1, own.facts.classes + 1),
        values["picture_id"][chosen_N],
        values["class_id"][chosen_N],
        box_N4,
        width * height,
        np.zeros(objects, np.bool_),
        segmentations=Segmentations(polygons, np.zeros(objects + 1, np.int64), np.zeros(0, np.int32)),
    )


def _some(picture_D: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """Rows of at most so many detections of each picture, which lie together: every other one from its best on."""
    starts = np.flatnonzero(np.r_[True, picture_D[1:] != picture_D[:-1]])
    nth_D = np.arange(len(picture_D)) - np.repeat(starts, np.diff(np.r_[starts, len(picture_D)]))
    rows: np.ndarray[Any, Any] = np.flatnonzero((nth_D % 2 == 0) & (nth_D < 2 * most))
    return rows


if __name__ == "__main__":
    evaluation_bench.main("maskrcnn", MaskRCNNSegmentation, sys.argv[1:], scored)
