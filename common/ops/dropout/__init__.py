"""Dropout whose mask is a pure function of (seed, call site, index of the element).

Element i is kept if and only if ``h16(i) >= threshold(p)``, where h16(i) is the low (even i) or high (odd i) half of
``hash(i >> 1)``, the hash of :mod:`common.ops.random_bits`. The mask is not stored: backward, other ranks, replayed
graphs and all implementations compute the same mask from the seed on the device. Indices must be below 2**32.
"""

from __future__ import annotations

from common.ops.dropout.reference import dropout_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

DROPOUT = Operation(
    "dropout",
    dropout_reference,
    {
        "triton": triton_kernels("common.ops.dropout.triton:dropout"),
    },
    kernel_names=(("dropout and layer norm", r"^dropout_kernel"),),
    cases="common.ops.dropout.cases",
)
"""Signature: ``dropout(x, p, seed, site)``."""
