"""What goes into a paste and what comes out. Shapes: D detections, S rows and columns of a mask, T runs of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """Masks of detections as the network gives them.

    Attributes:
        probability_DSS: of the predicted class, fp32, fp16 or bf16.
        boxes_D4: fp32 corners in the published picture, px.
        size_D2: height and width of the published picture, px; whole numbers of any dtype.
        there_D: bool, whether there is a detection at all.
    """

    probability_DSS: Tensor
    boxes_D4: Tensor
    size_D2: Tensor
    there_D: Tensor


class MaskRuns(NamedTuple):
    """Run-lengths of many masks, one mask after another.

    Attributes:
        counts_D: int32, runs of each; 0 where there is no detection, at least 1 where there is.
        runs_T: int32, their lengths, px: zeros and ones in turn, zeros first. A mask's sum is its picture's area.
    """

    counts_D: Tensor
    runs_T: Tensor


class Paste(NamedTuple):
    """The two passes of an implementation, over masks and with the threshold of their probabilities.

    Attributes:
        count_runs: gives (D,) int32, how many runs each detection has.
        write_ends: is told (D,) int64, where each detection's runs begin, and fills (T,) int32 with where each ends.
    """

    count_runs: Callable[[Masks, float], Tensor]
    write_ends: Callable[[Masks, float, Tensor, Tensor], None]


@torch.no_grad()
def find_runs(
    paste: Paste, threshold: float, probability_DSS: Tensor, boxes_D4: Tensor, size_D2: Tensor, there_D: Tensor
) -> MaskRuns:
    """Run-lengths of all detections in their whole pictures. Waits for the device once, for the number of all runs.

    Args:
        paste: implementation.
        threshold: probability above which a pixel belongs to the object.
        probability_DSS, boxes_D4, size_D2, there_D: see :class:`Masks`; of any number of pictures.
    """
    masks = Masks(probability_DSS, boxes_D4, size_D2, there_D)
    counts_D = paste.count_runs(masks, threshold)
    end_D = counts_D.long().cumsum(0)
    total = int(end_D[-1]) if len(end_D) else 0
    first_D = end_D - counts_D
    ends_T = torch.empty(total, dtype=torch.int32, device=counts_D.device)
    paste.write_ends(masks, threshold, first_D, ends_T)
    begins_T = torch.zeros(total + 1, dtype=torch.bool, device=counts_D.device)
    begins_T.index_fill_(0, first_D, True)  # of those without runs: the next one's, or one more than there are
    before_T = torch.where(begins_T[:-1], 0, ends_T.roll(1))
    return MaskRuns(counts_D, ends_T - before_T)
