"""Linear layer with one output, the logit, computed in fp32 from inputs of any dtype.

The product is one sum per row, so its time is that of reading the inputs. Neither the inputs nor their gradient are
stored in fp32. Shapes: B samples, K inputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def logit_reference(x_BK: Tensor, weight_1K: Tensor, bias_1: Tensor) -> Tensor:
    """Return ``x weight^T + bias``, (B,), in fp32, or fp64 for fp64 inputs.

    Args:
        x_BK: inputs, contiguous.
        weight_1K, bias_1: parameters, in the dtype of the inputs.
    """
    return F.linear(widen(x_BK), widen(weight_1K), widen(bias_1)).squeeze(1)


MOST_INPUTS = 2048
"""Largest number of inputs, because a program holds whole rows."""


LOGIT = Operation(
    "logit",
    logit_reference,
    {
        "fused": triton_kernels("common.ops.logit.triton:logit", most={"inputs": MOST_INPUTS}),
    },
    kernel_names=(("logits", r"^logit_"),),
    cases="common.ops.logit.cases",
)
"""Signature: ``logit(x_BK, weight_1K, bias_1)``. Sizes of a request: ``inputs``."""
