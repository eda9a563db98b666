"""Casts to FP8 with delayed scaling: ``round(scale * x)``, its transpose, and the scale of the next use, in one pass.

A scale maps a tensor onto the range of its format, ``scale = largest value of the format / amax``. *Delayed* means that
amax, the largest magnitude, is that of the tensor's previous use: so the cast reads its input once, and leaves behind
the scale that its own amax gives (Transformer Engine's ``DelayedScaling`` with ``amax_history_len=1``,
``amax_compute_algo="most_recent"``, ``margin=0``). What is larger than the previous amax saturates. An amax that is
zero or not finite leaves the scale as it is. NaN stays NaN and infinity becomes NaN, so that an overflow still arrives
in the gradients.

At the first use nothing is known (scale 0). The scale then comes from the amax of at most ``SAMPLED_ROWS`` evenly
spaced rows with ``FIRST_MARGIN`` to spare, chosen on the device: no second pass over the tensor, no launch that all
later uses would pay for, and none of the zeros that a fixed first scale would make of gradients around 1e-7. A
floating-point format loses nothing by a few bits of margin. Kernels that compute a result and write it in FP8 at once
(:mod:`common.ops.fp8_cast.device` has what they share) do the same with ``SAMPLED_ROWS_OF_COMPUTED`` rows of it.

With ``frozen_scales``, as in evaluation, a use takes the scale and leaves it alone.

The formats are e4m3fn (448 at most) for activations and weights, and e5m2 (57,344) for gradients: Micikevicius et al.,
FP8 Formats for Deep Learning, arXiv:2209.05433. Shapes: M rows, K columns.
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
