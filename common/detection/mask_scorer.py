"""Scorer that computes COCO's metrics of boxes and masks.

Separate processes compute the overlaps of masks while this process scores the boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from common.contract.evaluation import Predictions, Scorer
from common.detection.annotations import Annotations
from common.detection.coco_matching import Pairs
from common.detection.coco_scorer import detections_of, made_up_boxes, pictures_seen
from common.detection.coco_scoring import THRESHOLDS, GroundTruth, Outlines, score
from common.detection.mask_overlaps import MaskColumns, MaskOverlaps, TruthMasks
from common.detection.overlap_processes import OverlapProcesses


class MaskScorer(Scorer):
    """Computes COCO's metrics of the boxes and masks of a :class:`common.detection.detections.DetectionBuffer`.

    Args:
        read: reads the ground truth, with segmentations, from the data folder; must be a module-level function, so
            that another process can receive it.
        device: device on which boxes and masks are matched.
        processes: number of processes that compute the overlaps of masks. 1: this process computes them.
    """

    def __init__(self, read: Callable[[Path], Annotations], device: torch.device, processes: int) -> None:
        self._read, self._device, self._count = read, device, processes
        self._truth: GroundTruth | None = None
        self._masks: TruthMasks | None = None
        self._processes: OverlapProcesses | None = None

    def warm_up(self) -> None:
        """Start the processes, and score synthetic detections."""
        self._start()
        score(*made_up_boxes(self._device))

    def open_data(self, root: Path) -> None:
        """Load the ground truth, and send its masks to the processes."""
        annotations = self._read(root)
        self._truth = GroundTruth.of(annotations, self._device)
        if self._count == 1:
            self._masks = TruthMasks(annotations)
        else:
            self._start()
            assert self._processes is not None
            self._processes.open_truth(annotations)

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``BBOX`` and ``SEGM``, COCO's other metrics, and ``eval_samples``.

        ``BBOX`` and ``SEGM`` are average precisions over thresholds from 0.5 to 0.95 and all areas. The other metrics
        append the names of :func:`common.detection.coco_scoring.score` to these names.

        Raises:
            RuntimeError: not every picture was evaluated exactly once.
            ValueError: a detection has an unknown picture or class, or is not finite, or its mask does not cover the
                picture.
            RankFailure: a process has ended.
        """
        assert self._truth is not None, "open_data comes first"
        pictures = pictures_seen(predictions, self._truth)
        values = predictions.values
        columns = MaskColumns(values["picture_id"], values["class_id"], values["run_count"], values["runs"])
        if self._processes is not None:
            self._processes.begin(columns, THRESHOLDS[0])
        found = detections_of(predictions, self._device)
        boxes = score(self._truth, found)
        if self._processes is not None:
            overlaps = self._processes.end()
        else:
            assert self._masks is not None
            overlaps = self._masks.overlaps(columns, THRESHOLDS[0])
        masks = score(self._truth, found, self._outlines(overlaps))
        return {**_named("BBOX", boxes), **_named("SEGM", masks), "eval_samples": pictures}

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _start(self) -> None:
        if self._processes is None and self._count > 1:
            self._processes = OverlapProcesses(self._count)

    def _outlines(self, overlaps: MaskOverlaps) -> Outlines:
        def column(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values).to(self._device)

        pairs = Pairs(column(overlaps.detection), column(overlaps.truth), column(overlaps.overlap))
        return Outlines(pairs, column(overlaps.area))


def _named(kind: str, figures: dict[str, float]) -> dict[str, float]:
    """Return COCO's metrics with ``kind`` before their names; AP is named ``kind`` alone."""
    return {kind if name == "AP" else f"{kind}_{name}": value for name, value in figures.items()}
