"""Dropout, and neighbouring frames side by side as one, in one pass over memory.

``y[s, b] = (d[2 s, b], d[2 s + 1, b])`` with d the frames after dropout, and zeros for a frame that is missing at the
end. The mask is that of :mod:`common.ops.dropout` over the frames as they come in, so that it does not depend on how
they are joined.

Legend: T frames, S = ceil(T / 2), B rows, H width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.rnnt.ops.joined_dropout.plain import JOINED, joined_dropout_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "JOINED"]


def _joined_dropout_triton(*args: Any) -> Tensor:
    from benchmarks.rnnt.ops.joined_dropout.triton import joined_dropout  # triton is imported only where it is used

    return joined_dropout(*args)


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["width"] % 2:
        return f"a hash decides on two neighbours, and a width of {request.sizes['width']} is odd"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _joined_dropout_triton, _unsupported),
    "torch": Implementation("torch", joined_dropout_torch, always),
}
"""Signature: ``joined_dropout(x_TBH, p, seed, site) -> y_SB2H``. Sizes of a request: ``width``."""

KERNEL_NAMES = (("dropout and layer norm", r"^joined_dropout_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
