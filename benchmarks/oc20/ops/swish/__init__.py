"""Swish, x sigmoid(x), with two derivatives.

PyTorch composes the first derivative of a graph that is differentiated again, and the second one, of about 20 kernels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


def swish_reference(x: Tensor) -> Tensor:
    """Return x sigmoid(x)."""
    return F.silu(x)


SWISH = Operation(
    "swish",
    swish_reference,
    {"triton": triton_kernels("benchmarks.oc20.ops.swish.triton:swish")},
    kernel_names=(("swish", r"^swish_"),),
    cases="benchmarks.oc20.ops.swish.cases",
)
"""Implementations of :func:`swish_reference`."""
