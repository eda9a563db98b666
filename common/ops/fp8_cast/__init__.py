"""Casts to FP8 with delayed scaling: ``round(scale * x)``, its transpose, and the scale of the next use, in one pass.

A scale maps a tensor to the range of its format: ``scale = largest value of the format / amax``, where amax is the
largest magnitude. *Delayed* means that amax comes from the previous use of the tensor. So the cast reads its input
once, and computes the next scale from its own amax (Transformer Engine's ``DelayedScaling`` with
``amax_history_len=1``, ``amax_compute_algo="most_recent"``, ``margin=0``). Values above the previous amax saturate. If
amax is zero or not finite, the scale does not change. NaN stays NaN and infinity becomes NaN, so that overflows remain
visible in the gradients.

At the first use the scale is 0 (unknown). It is then computed on the device from the amax of at most ``SAMPLED_ROWS``
evenly spaced rows, with the margin ``FIRST_MARGIN``. This needs no second pass over the tensor and no launch in later
uses, whereas a fixed first scale would round gradients of about 1e-7 to zero. A few bits of margin cost no precision in
a floating-point format. Kernels that compute a result and write it in FP8 (:mod:`common.ops.fp8_cast.device`) do the
same with ``SAMPLED_ROWS_OF_COMPUTED`` rows of the result.

With ``frozen_scales``, as in evaluation mode, a use does not update the scale.

The formats are e4m3fn (largest value 448) for activations and weights, and e5m2 (57,344) for gradients: Micikevicius et
al., FP8 Formats for Deep Learning, arXiv:2209.05433. Shapes: M rows, K columns.
"""

from __future__ import annotations

from common.ops.fp8_cast.reference import cast_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

FP8_CAST = Operation(
    "fp8_cast",
    cast_reference,
    {
        "triton": triton_kernels("common.ops.fp8_cast.triton:cast"),
    },
    kernel_names=(("FP8 casts", r"^fp8_cast_"),),
    cases="common.ops.fp8_cast.cases",
)
"""Signature: ``cast(x, scaling, dtype, transpose, frozen_scales=False) -> Fp8Tensor``."""
