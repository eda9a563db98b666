"""Scorer that computes COCO's metrics from an evaluation's detections, in a rank's process or in a separate one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from common.contract.evaluation import Predictions, Scorer
from common.detection.annotations import Annotations
from common.detection.coco_matching import Pairs
from common.detection.coco_scoring import LIMITS, THRESHOLDS, Detections, GroundTruth, Outlines, score
from common.detection.mask_overlaps import MaskColumns, MaskOverlaps, TruthMasks
from common.detection.overlap_processes import OverlapProcesses
from common.evaluation.counts import check_whole_set

Part = TypeVar("Part", GroundTruth, Detections)

RANDOM_PICTURES = 64
"""Synthetic pictures of a warm-up. Sorting few numbers uses other kernels than sorting many."""


class CocoScorer(Scorer):
    """Computes COCO's metrics from the columns of a :class:`common.detection.detections.DetectionBuffer`.

    Args:
        read: reads the ground truth from the data folder; must be a module-level function, so that another process
            can receive it.
    """

    def __init__(self, read: Callable[[Path], Annotations], device: torch.device) -> None:
        self._read, self._device = read, device
        self._truth: GroundTruth | None = None

    def warm_up(self) -> None:
        """Score synthetic detections once, so that kernels are loaded before timing. Reads no data."""
        score(*random_boxes(self._device))

    def open_data(self, root: Path) -> None:
        """Load the ground truth."""
        self._truth = GroundTruth.of(self._read(root), self._device)

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``mean_average_precision``, COCO's other metrics and ``eval_samples``.

        ``mean_average_precision`` is over thresholds from 0.5 to 0.95 and all areas. The other metrics have the names
        of :func:`common.detection.coco_scoring.score`.

        Raises:
            RuntimeError: not every picture was evaluated exactly once.
            ValueError: a detection has an unknown picture or class, or is not finite.
        """
        assert self._truth is not None, "open_data comes first"
        pictures = pictures_seen(predictions, self._truth)
        figures = score(self._truth, detections_of(predictions, self._device))
        precision = figures.pop("AP")
        return {"mean_average_precision": precision, **figures, "eval_samples": pictures}


def random_boxes(device: torch.device) -> tuple[GroundTruth, Detections]:
    """Return a synthetic box in each of a few pictures, and random detections, of which some match it."""
    pictures, random = torch.arange(RANDOM_PICTURES), torch.Generator().manual_seed(0)
    box = torch.tensor([[8.0, 8.0, 16.0, 16.0]], dtype=torch.float64)
    truth = GroundTruth(
        pictures,
        torch.zeros(1, dtype=torch.int64),
        pictures,
        torch.zeros_like(pictures),
        box.repeat(len(pictures), 1),
        torch.full((len(pictures),), 256.0, dtype=torch.float64),
        torch.zeros(len(pictures), dtype=torch.bool),
    )
    picture_D = pictures.repeat_interleave(LIMITS[-1])
    found = Detections(
        picture_D,
        torch.zeros_like(picture_D),
        box + 8 * torch.rand((len(picture_D), 4), generator=random, dtype=torch.float64),
        torch.rand(len(picture_D), generator=random, dtype=torch.float64),
    )
    return _moved(truth, device), _moved(found, device)


def pictures_seen(predictions: Predictions, truth: GroundTruth) -> int:
    """Return the number of evaluated pictures; raise RuntimeError unless each of ``truth`` was evaluated once."""
    seen = predictions.values["pictures"]
    pictures = np.unique(seen)
    check_whole_set(len(seen), len(truth.pictures), "pictures")
    check_whole_set(len(pictures), len(truth.pictures), "different pictures")
    return len(pictures)


def detections_of(predictions: Predictions, device: torch.device) -> Detections:
    """Return the boxes of predictions on ``device``, converted to int64 and float64."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(predictions.values[name]).to(device, dtype)

    return Detections(
        column("picture_id", torch.int64),
        column("class_id", torch.int64),
        column("box", torch.float64),
        column("score", torch.float64),
    )


def _moved(part: Part, device: torch.device) -> Part:
    """Return a copy with all columns on the device."""
    return type(part)(**{name: column.to(device) for name, column in vars(part).items()})


class MaskScorer(CocoScorer):
    """Computes COCO's metrics of the boxes and masks of a :class:`common.detection.detections.DetectionBuffer`.

    Args:
        read: reads the ground truth, with segmentations, from the data folder; must be a module-level function, so
            that another process can receive it.
        device: device on which boxes and masks are matched.
        processes: number of processes that compute the overlaps of masks. 1: this process computes them.
    """

    def __init__(self, read: Callable[[Path], Annotations], device: torch.device, processes: int) -> None:
        super().__init__(read, device)
        self._count = processes
        self._masks: TruthMasks | None = None
        self._processes: OverlapProcesses | None = None

    def warm_up(self) -> None:
        """Start the processes, and score synthetic detections."""
        self._start()
        super().warm_up()

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
