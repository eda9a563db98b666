"""The joint network's hidden layer of packed rows: ``dropout(relu(f[s, b] + g[u, b]))`` of each (b, s, u).

Works without autograd. Backward adds up over u for f and over s for g. It gets a gradient that is zero where the result
is zero, so that ReLU and dropout need no mask of their own. The dropout mask is that of :mod:`common.ops.dropout`, by
row and column.

Legend: S frames, N tokens before, with none at all, B utterances, H width, R rows.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.joint.reference import PASSES, JointPasses
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["JOINT", "JointPasses"]

WIDEST = 2048
"""What a program holds of some rows at once."""


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
