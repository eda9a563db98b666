"""The joint network's hidden layer of packed rows: ``dropout(relu(f[s, b] + g[u, b]))`` of each (b, s, u).

Works without autograd. Backward adds up over u for f and over s for g; where the result is zero, no gradient passes,
so that ReLU and dropout need no mask of their own. The dropout mask is that of :mod:`common.ops.dropout`, by row and
column.

Legend: S frames, N tokens before, with none at all, B utterances, H width, R rows.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.joint.plain import PASSES, JointPasses
from common.ops.implementation import Implementation, always

__all__ = ["IMPLEMENTATIONS", "JointPasses"]

IMPLEMENTATIONS = {
    "torch": Implementation("torch", PASSES, always),
}
"""Functions: :class:`JointPasses`."""

KERNEL_NAMES = (("joint", r"^joint_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
