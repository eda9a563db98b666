"""For every anchor of a picture the box that it has to find.

Ren et al., arXiv:1506.01497, section 3.1.2 (thresholds, and the best anchors of a box that no anchor overlaps enough);
Liu et al., arXiv:1512.02325, section 2.2 (SSD's rule).
"""

from __future__ import annotations

from torch import Tensor

from common.ops.anchor_matching.plain import MatchingRule, match_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton


def _match_triton(anchors_A4: Tensor, boxes_BM4: Tensor, count_B: Tensor, rule: MatchingRule) -> Tensor:
    from common.ops.anchor_matching.triton import match  # triton is imported only where it is used

    return match(anchors_A4, boxes_BM4, count_B, rule)


def _triton_unsupported(request: OperationRequest) -> str | None:
    return no_triton(request.device)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _match_triton, _triton_unsupported),
    "torch": Implementation("torch", match_torch, always),
}
"""Functions: :func:`match_torch`. Arithmetic is fp32 whatever the dtype, so all give the same matches."""

KERNEL_NAMES = (("matching", r"^anchor_matching_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
