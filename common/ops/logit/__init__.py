"""Linear layer with one output, the logit, in fp32 of inputs in any dtype.

A product with one column is a sum over each row: it moves the inputs and little else. Neither they nor their gradient
exist in fp32. Shapes: B samples, K inputs.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.logit.plain import logit_torch
from common.ops.triton_support import triton_unsupported

MOST_INPUTS = 2048
"""What a program holds of a sample at once."""


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["inputs"] > MOST_INPUTS:
        return f"a row of {request.sizes['inputs']} inputs is more than {MOST_INPUTS}"
    return triton_unsupported(request)


def _fused(x_BK: Tensor, weight_1K: Tensor, bias_1: Tensor) -> Tensor:
    # triton is imported only where it is used
    from common.ops.logit.triton import logit

    return logit(x_BK, weight_1K, bias_1)


IMPLEMENTATIONS = {
    "fused": Implementation("fused", _fused, _unsupported),
    "torch": Implementation("torch", logit_torch, always),
}
"""Signature: ``logit(x_BK, weight_1K, bias_1)``. Sizes of a request: ``inputs``."""

KERNEL_NAMES = (("logits", r"^logit_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
