"""Adagrad in Triton.

An update moves, with gradients and weights of 2 bytes, 20 bytes per parameter: g w s in, w s and the model's weight
out. Root and quotient are rounded correctly, so that the first update of an element has the size of the learning rate.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.optim.update_triton import DECAY, MultiTensorUpdate


@triton.jit
def _adagrad(
    gradients,
    weights,
    sums_ptr,
    second_ptr,
    offsets,
    mask,
    group_ptr,
    square_ptr,
    tensors,
    rate,
    factor,
    extra_ptr,
    FORMULA: tl.constexpr,
):
    sums = tl.load(sums_ptr + offsets, mask=mask, other=0.0)
    gradients += tl.load(group_ptr + DECAY) * weights
    sums += gradients * gradients
    tl.store(sums_ptr + offsets, sums, mask=mask)
    return tl.div_rn(gradients, tl.sqrt_rn(sums) + FORMULA.epsilon), rate


class TritonAdagrad(MultiTensorUpdate):
    """Adagrad in Triton: the same results as ``ReferenceAdagrad`` up to rounding."""

    kinds = ("sum",)
    rule = _adagrad

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`; Adagrad does not depend on ``step``."""
        self._update(rates_G, grad_factor, write)
