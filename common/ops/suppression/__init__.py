"""Non-maximum suppression of many pictures at fixed shapes, without a wait for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.suppression.plain import suppress_torch
from common.ops.triton_support import triton_unsupported


def _suppress_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from common.ops.suppression.triton import suppress  # triton is imported only where it is used

    return suppress(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _suppress_triton, triton_unsupported),
    "torch": Implementation("torch", suppress_torch, always),
}
"""Signature: ``suppress(boxes_BN4, score_BN, class_BN, threshold, keep, pixel, presorted)``.

A request's dtype is that of the boxes.
"""

KERNEL_NAMES = (("suppression", r"^suppression_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
