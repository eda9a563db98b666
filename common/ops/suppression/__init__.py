"""Non-maximum suppression of many pictures at fixed shapes, without waiting for the device.

Shapes: B pictures, N candidates, K kept, C of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.boxes import intersection_over_union
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

BLOCK = 64
"""Candidates per block. They are processed one by one; then all that they suppress are removed from later blocks."""


@torch.no_grad()
def suppress_reference(
    boxes_BN4: Tensor,
    score_BN: Tensor,
    class_BN: Tensor | None,
    threshold: float,
    keep: int,
    pixel: float = 0.0,
    presorted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the best candidates that no better candidate of their class overlaps too much.

    In descending order of score, ties in input order, a candidate is kept unless a kept one of its class overlaps it
    by more than ``threshold`` (intersection over union).

    Args:
        boxes_BN4: corners x1, y1, x2, y2.
        score_BN: -inf where there is no candidate.
        class_BN: classes; None if all candidates have the same.
        threshold: largest overlap that two kept candidates of a class may have; rounded to fp32.
        keep: largest number of kept candidates per picture.
        pixel: added to the lengths of sides, see :mod:`common.ops.boxes`.
        presorted: whether the scores descend already, so that no sort is needed.

    Returns:
        Indices of the kept candidates, int64 (B, K), best first, and whether each exists, bool (B, K). Absent ones
        have index 0. K is the smaller of ``keep`` and N.
    """
    candidates = score_BN.shape[1]
    if presorted:
        order_BN = torch.arange(candidates, device=score_BN.device).expand_as(score_BN)
        out_BN = score_BN == -torch.inf
    else:
        order_BN = score_BN.sort(dim=1, descending=True, stable=True).indices
        boxes_BN4 = boxes_BN4.gather(1, order_BN.unsqueeze(2).expand_as(boxes_BN4))
        class_BN = None if class_BN is None else class_BN.gather(1, order_BN)
        out_BN = score_BN.gather(1, order_BN) == -torch.inf
    for start in range(0, candidates, BLOCK):
        stop = min(start + BLOCK, candidates)
        overlap_BCN = intersection_over_union(boxes_BN4[:, start:stop], boxes_BN4[:, start:], pixel)
        covers_BCN = overlap_BCN > threshold
        if class_BN is not None:
            covers_BCN &= class_BN[:, start:stop, None] == class_BN[:, None, start:]
        covers_BCC = covers_BCN[:, :, : stop - start].triu(1)
        out_BC = out_BN[:, start:stop]
        for row in range(stop - start):
            out_BC |= covers_BCC[:, row] > out_BC[:, row, None]
        out_BN[:, stop:] |= (covers_BCN[:, :, stop - start :] > out_BC.unsqueeze(2)).any(1)
    kept_BN = ~out_BN
    first_BK = kept_BN.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    there_BK = kept_BN.gather(1, first_BK)
    return torch.where(there_BK, order_BN.gather(1, first_BK), 0), there_BK


SUPPRESSION = Operation(
    "suppression",
    suppress_reference,
    {
        "triton": triton_kernels("common.ops.suppression.triton:suppress"),
    },
    kernel_names=(("suppression", r"^suppression_"),),
    cases="common.ops.suppression.cases",
)
"""Signature: ``suppress(boxes_BN4, score_BN, class_BN, threshold, keep, pixel, presorted)``. The dtype of a request is
that of the boxes."""
