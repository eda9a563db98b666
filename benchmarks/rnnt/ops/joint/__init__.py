"""Hidden layer of the joint network on packed rows: ``dropout(relu(f[s, b] + g[u, b]))`` for each (b, s, u).

The functions work without autograd. Backward sums over u for f and over s for g. Its input gradient must be zero
where the result is zero, so ReLU and dropout need no mask in backward. The dropout mask is that of
:mod:`common.ops.dropout`, by row and column.

Legend: S frames, N token positions, B utterances, H width, R rows.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.joint.reference import PASSES, JointPasses
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["JOINT", "JointPasses"]

WIDEST = 2048
"""Maximum width, because a program keeps whole rows in registers."""


JOINT = Operation(
    "joint",
    PASSES,
    {
        "triton": triton_kernels("benchmarks.rnnt.ops.joint.triton", most={"width": WIDEST}),
    },
    kernel_names=(("joint", r"^joint_"),),
    cases="benchmarks.rnnt.ops.joint.cases",
)
"""Functions: :class:`JointPasses`. Sizes of a request: ``width``."""
