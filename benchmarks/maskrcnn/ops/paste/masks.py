"""Inputs and outputs of a paste. Shapes: D detections, S rows and columns of a mask, T runs of all detections."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """Masks of detections from the network.

    Attributes:
        probability_DSS: probabilities of the predicted class, fp32, fp16 or bf16.
        boxes_D4: fp32 corners in the published picture, px.
        size_D2: height and width of the published picture, px; whole numbers of any dtype.
        there_D: bool, False for slots without a detection.
    """

    probability_DSS: Tensor
    boxes_D4: Tensor
    size_D2: Tensor
    there_D: Tensor


class MaskRuns(NamedTuple):
    """Run lengths of many masks, one mask after another.

    Attributes:
        counts_D: int32, number of runs; 0 for slots without a detection, otherwise at least 1.
        runs_T: int32, lengths in px of alternating runs of zeros and ones, zeros first. The sum for a mask is the area
            of its picture.
    """

    counts_D: Tensor
    runs_T: Tensor


class Paste(NamedTuple):
    """The two passes of an implementation, which take masks and the threshold of their probabilities.

    Attributes:
        count_runs: returns the number of runs of each detection, (D,) int32.
        write_ends: takes the index of each detection's first run, (D,) int64, and fills (T,) int32 with the run ends.
    """

    count_runs: Callable[[Masks, float], Tensor]
    write_ends: Callable[[Masks, float, Tensor, Tensor], None]


@torch.no_grad()
def find_runs(
    paste: Paste, threshold: float, probability_DSS: Tensor, boxes_D4: Tensor, size_D2: Tensor, there_D: Tensor
) -> MaskRuns:
    """Return the run lengths of all detections in their whole pictures. Waits once for the device: for the sum of runs.

    Args:
        paste: implementation.
        threshold: probability above which a pixel belongs to the object.
        probability_DSS, boxes_D4, size_D2, there_D: see :class:`Masks`; detections of any number of pictures.
    """
    masks = Masks(probability_DSS, boxes_D4, size_D2, there_D)
    counts_D = paste.count_runs(masks, threshold)
    end_D = counts_D.long().cumsum(0)
    total = int(end_D[-1]) if len(end_D) else 0
    first_D = end_D - counts_D
    ends_T = torch.empty(total, dtype=torch.int32, device=counts_D.device)
    paste.write_ends(masks, threshold, first_D, ends_T)
    begins_T = torch.zeros(total + 1, dtype=torch.bool, device=counts_D.device)
    # A detection without runs has the first run of the next one, or ``total``, hence one more element.
    begins_T.index_fill_(0, first_D, True)
    before_T = torch.where(begins_T[:-1], 0, ends_T.roll(1))
    return MaskRuns(counts_D, ends_T - before_T)
