"""Dropout, and neighbouring frames side by side as one, in one pass over memory.

``y[s, b] = (d[2 s, b], d[2 s + 1, b])`` with d the frames after dropout, and zeros for a frame that is missing at the
end. The mask is that of :mod:`common.ops.dropout` over the frames as they come in, so that it does not depend on how
they are joined.

Legend: T frames, S = ceil(T / 2), B rows, H width.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.joined_dropout.reference import JOINED, joined_dropout_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["JOINED", "JOINED_DROPOUT"]


JOINED_DROPOUT = Operation(
    "joined_dropout",
    joined_dropout_reference,
    {
        "triton": triton_kernels("benchmarks.rnnt.ops.joined_dropout.triton:joined_dropout", multiple_of={"width": 2}),
    },
    kernel_names=(("dropout and layer norm", r"^joined_dropout_"),),
    cases="benchmarks.rnnt.ops.joined_dropout.cases",
)
"""Signature: ``joined_dropout(x_TBH, p, seed, site) -> y_SB2H``. Sizes of a request: ``width``."""
