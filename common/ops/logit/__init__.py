"""Linear layer with one output, the logit, in fp32 of inputs in any dtype.

A product with one column is a sum over each row: it moves the inputs and little else. Neither they nor their gradient
exist in fp32. Shapes: B samples, K inputs.
"""

from __future__ import annotations

from common.ops.logit.reference import logit_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_INPUTS = 2048
"""What a program holds of a sample at once."""


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
