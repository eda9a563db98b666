"""Linear layer with one output, the logit, computed in fp32 from inputs of any dtype.

The product is one sum per row, so its time is that of reading the inputs. Neither the inputs nor their gradient are
stored in fp32. Shapes: B samples, K inputs.
"""

from __future__ import annotations

from common.ops.logit.reference import logit_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

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
