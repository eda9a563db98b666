"""Evaluation of DeepCAM: the mean over all validation samples of a sample's mean IoU over the classes (HPC rules)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.deepcam.model import DeepLab, normalised
from benchmarks.deepcam.samples import CLASSES
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation, Counts, MeanScorer

SCORER = MeanScorer("mean_iou", "iou", "samples")
"""Scorer of the mean over all samples."""


def sample_iou(found_NHW: Tensor, label_NHW: Tensor) -> Tensor:
    """Return the mean over the classes of intersection over union for every sample, (N,) fp64.

    A class that is neither found nor labelled in a sample counts as 1.
    """
    ious = []
    for number in range(CLASSES):
        found, label = found_NHW == number, label_NHW == number
        intersection_N, union_N = ((found & label).sum((1, 2)), (found | label).sum((1, 2)))
        ious.append(torch.where(union_N > 0, intersection_N.double() / union_N.clamp(min=1), 1.0))
    return torch.stack(ious).mean(0)


def evaluation_of(
    model: DeepLab,
    dtype: torch.dtype,
    example: dict[str, Tensor],
    open_source: Callable[[Path], EvalSource],
    layout: Layout,
    capture: bool,
) -> CountedEvaluation:
    """Return the evaluation of the network that is being trained; see :class:`CountedEvaluation`.

    Args:
        dtype: dtype of the normalised samples.
        example: a batch on the device: ``x`` (N, H, W, C) fp32, ``y`` (N, H, W) uint8, ``shift`` and ``scale`` (C,)
            fp32, ``weight`` (N,), 0 for padding.
    """
    counts = Counts(layout, ("samples",), ("iou",))

    def count(batch: dict[str, Tensor]) -> None:
        weight_N = batch["weight"].double()
        logits_NKHW = model(normalised(batch["x"], batch["shift"], batch["scale"], dtype))
        counts.add(weight_N.sum(), (sample_iou(logits_NKHW.argmax(1), batch["y"]) * weight_N).sum())

    return CountedEvaluation(SCORER, model, count, counts, example, open_source, capture)
