"""LARS and SGD in Triton.

Before the update, partial sums of squares of every block (one launch per dtype) are added up by fragment. The update
computes the trust ratio of its tensor itself.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.optim import update_triton as multi_tensor
from common.optim.rules import Binding
from common.optim.update_triton import (
    BLOCK_COLUMNS,
    DECAY,
    GROUP,
    GROUP_COLUMNS,
    RATE_INSIDE,
    TRUST,
    MultiTensorUpdate,
    place_of,
)


@triton.jit
def _measure_kernel(
    weights_ptr,  # [size] masters or parameters of one shard
    gradients_ptr,  # [size]
    blocks_ptr,  # [blocks, BLOCK_COLUMNS] int64
    groups_ptr,  # [groups, GROUP_COLUMNS] float32
    pairs_ptr,  # [blocks, 2] float32, written: squares of weights, for tensors with a trust ratio, and of gradients
    stats_ptr,  # [2] float32, the first: a gradient is not finite
    first_block,
    BLOCK: tl.constexpr,
):
    """Compute partial sums of squares of one block, and whether its gradients are finite."""
    block = tl.program_id(0) + first_block
    block_ptr = blocks_ptr + block * BLOCK_COLUMNS
    offsets, _, mask = place_of(block_ptr, BLOCK)
    gradients = tl.load(gradients_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    infinite = tl.max(tl.where(tl.abs(gradients) < float("inf"), 0, 1), axis=0)
    if infinite > 0:
        tl.store(stats_ptr, 1.0)  # every program that writes writes the same
    tl.store(pairs_ptr + 2 * block + 1, tl.sum(gradients * gradients, axis=0))
    if tl.load(groups_ptr + tl.load(block_ptr + GROUP) * GROUP_COLUMNS + TRUST) > 0:
        weights = tl.load(weights_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(pairs_ptr + 2 * block, tl.sum(weights * weights, axis=0))


@triton.jit
def _momentum(
    gradients,
    weights,
    momentum_ptr,
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
    momentum = tl.load(momentum_ptr + offsets, mask=mask, other=0.0)
    inside = tl.load(group_ptr + RATE_INSIDE) > 0
    decay = tl.load(group_ptr + DECAY)
    weight_norm = tl.sqrt(tl.load(square_ptr))
    gradient_norm = tl.sqrt(tl.load(square_ptr + tensors)) * factor
    defined = (tl.load(group_ptr + TRUST) > 0) & (weight_norm > 0.0) & (gradient_norm > 0.0)
    denominator = gradient_norm + decay * weight_norm + FORMULA.epsilon
    ratio = tl.where(defined, FORMULA.eta * weight_norm / tl.where(defined, denominator, 1.0), 1.0)
    step = (gradients + decay * weights) * (ratio * tl.where(inside, -rate, 1.0))
    momentum = FORMULA.momentum * momentum + step
    tl.store(momentum_ptr + offsets, momentum, mask=mask)
    direction = FORMULA.momentum * momentum + step if FORMULA.nesterov else momentum
    return direction, tl.where(inside, -1.0, rate)


class TritonMomentum(MultiTensorUpdate):
    """LARS and SGD in Triton: the same results as ``ReferenceMomentum`` up to rounding."""

    kinds = ("momentum",)
    rule = _momentum

    def __init__(self, formula: Any, binding: Binding) -> None:
        super().__init__(formula, binding)
        self._shares_of_norm = torch.zeros(self._fragments, dtype=torch.float32, device=self._squares.device)

    def measure(self, stats: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        for shard, _, first, last in self._parts:
            _measure_kernel[(last - first,)](
                shard.parameters if self._formula.norm_of_model else shard.masters,
                shard.gradients,
                self._blocks,
                self._groups,
                self._pairs,
                stats,
                first,
                BLOCK=multi_tensor.BLOCK,
                num_warps=multi_tensor.WARPS,
            )
        self._add_norms(self._shares_of_norm)
        torch.sum(self._shares_of_norm, dim=0, out=stats[1])

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`; momentum does not depend on ``step``."""
        self._update(rates_G, grad_factor, write)
