"""Dropout whose mask is a pure function of (seed, call site, index of the element).

Element i is kept if and only if ``h16(i) >= threshold(p)``, where h16(i) is the low (even i) or high (odd i) half of
``hash(i >> 1)``, the hash of :mod:`common.ops.random_bits`. The mask needs no state and no memory: backward, another
rank, a replayed graph and every implementation compute the same one from the seed on the device. Indices stay below
2**32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.dropout.plain import dropout_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _dropout_triton(*args: Any) -> Tensor:
    from common.ops.dropout.triton import dropout  # triton is imported only where it is used

    return dropout(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _dropout_triton, triton_unsupported),
    "torch": Implementation("torch", dropout_torch, always),
}
"""Signature: ``dropout(x, p, seed, site)``."""

KERNEL_NAMES = (("dropout and layer norm", r"^dropout_kernel"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
