"""The joint network's hidden layer of packed rows: ``dropout(relu(f[s, b] + g[u, b]))`` of each (b, s, u).

Works without autograd. Backward adds up over u for f and over s for g; where the result is zero, no gradient passes,
so that ReLU and dropout need no mask of their own. The dropout mask is that of :mod:`common.ops.dropout`, by row and
column.

Legend: S frames, N tokens before, with none at all, B utterances, H width, R rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.rnnt.ops.joint.plain import PASSES, JointPasses
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "JointPasses"]

WIDEST = 2048
"""What a program holds of some rows at once."""


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["width"] > WIDEST:
        return f"a row of {request.sizes['width']} is wider than {WIDEST}"
    return triton_unsupported(request)


def _forward_triton(*args: Any) -> Tensor:
    from benchmarks.rnnt.ops.joint import triton  # triton is imported only where it is used

    return triton.forward(*args)


def _backward_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from benchmarks.rnnt.ops.joint import triton  # triton is imported only where it is used

    return triton.backward(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", JointPasses(_forward_triton, _backward_triton), _unsupported),
    "torch": Implementation("torch", PASSES, always),
}
"""Functions: :class:`JointPasses`. Sizes of a request: ``width``."""

KERNEL_NAMES = (("joint", r"^joint_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
