"""Update rules in Triton: LARS and SGD, LAMB, AdamW and Adam, and Adagrad.

**LARS and SGD.** Before the update, partial sums of squares of every block (one launch per dtype) are added up by
fragment. The update computes the trust ratio of its tensor itself.

**LAMB, AdamW and Adam.** The ratio of a tensor depends on all of its directions u, hence LAMB passes twice over the
weights. What moves least, in bytes per parameter with gradients and weights of 2 bytes, and 4 each for master, m and v:

    scheme                                first pass                    second pass                        sum
    keep u (4 more bytes of memory)       g m v w in, m v u out = 26    u w in, w p out             = 14   40
    compute u again from the new m and v  g m v w in, m v out   = 22    m v w in, w p out           = 18   40
    norms first, write all at the end     g m v w in            = 14    g m v w in, m v w p out     = 28   42

The second is used: as few bytes as the first without its memory. With ``measure``, which reads g alone (2), an update
moves 42 bytes per parameter, and 44 with float32 weights. Without trust ratio everything is done in the first pass: 30
bytes, or 32; 26 with masters that are kept as remainders. Gradients in float32 of 16-bit weights add 2 bytes to each of
the two passes that read them. Merging ``measure`` into the first pass is impossible: m and v must not be written before
it is known that all gradients are finite, and v is not linear in the clipping factor.

**Adagrad.** An update moves, with gradients and weights of 2 bytes, 20 bytes per parameter: g w s in, w s and the
model's weight out. Root and quotient are rounded correctly, so that the first update of an element has the size of the
learning rate.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import math
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
    offsets_of,
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
    offsets, _, mask = offsets_of(block_ptr, BLOCK)
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
        for _, shard, _, first, last in self._parts:
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
        """Momentum does not depend on ``step``."""
        self._update(rates_G, grad_factor, write)


@triton.jit
def adaptive_corrections_kernel(
    step_ptr,  # 0-d int64
    log_betas_ptr,  # [2] float64
    corrections_ptr,  # [2] float32, written
):
    """Compute the factors for m and sqrt(v) that correct the bias, in float64, because 1 - beta^t cancels digits."""
    count = (tl.load(step_ptr) + 1).to(tl.float64)
    first = 1.0 - tl.exp(count * tl.load(log_betas_ptr))
    second = 1.0 - tl.exp(count * tl.load(log_betas_ptr + 1))
    tl.store(corrections_ptr, (1.0 / first).to(tl.float32))
    tl.store(corrections_ptr + 1, (1.0 / tl.sqrt(second)).to(tl.float32))


@triton.jit
def _adaptive(
    gradients,
    weights,
    averages_ptr,
    square_averages_ptr,
    offsets,
    mask,
    group_ptr,
    square_ptr,
    tensors,
    rate,
    factor,
    corrections_ptr,
    FORMULA: tl.constexpr,
):
    average = tl.load(averages_ptr + offsets, mask=mask, other=0.0)
    square_average = tl.load(square_averages_ptr + offsets, mask=mask, other=0.0)
    decay = tl.load(group_ptr + DECAY)
    if gradients is None:
        weight_norm = tl.sqrt(tl.load(square_ptr))
        direction_norm = tl.sqrt(tl.load(square_ptr + tensors))
        defined = (weight_norm > 0.0) & (direction_norm > 0.0)
        rate *= tl.where(defined, weight_norm / tl.where(defined, direction_norm, 1.0), 1.0)
    else:
        if FORMULA.decay_in_gradient:
            gradients += decay * weights
            decay = 0.0
        average = FORMULA.beta1 * average + (1.0 - FORMULA.beta1) * gradients
        square_average = FORMULA.beta2 * square_average + (1.0 - FORMULA.beta2) * gradients * gradients
        tl.store(averages_ptr + offsets, average, mask=mask)
        tl.store(square_averages_ptr + offsets, square_average, mask=mask)
    root = tl.sqrt(square_average) * tl.load(corrections_ptr + 1)
    direction = average * tl.load(corrections_ptr) / (root + FORMULA.epsilon) + decay * weights
    return direction, rate


class TritonAdaptive(MultiTensorUpdate):
    """LAMB, AdamW and Adam in Triton: the same results as ``ReferenceAdaptive`` up to rounding."""

    kinds = ("exp_avg", "exp_avg_sq")
    rule = _adaptive

    def __init__(self, formula: Any, binding: Binding) -> None:
        super().__init__(formula, binding)
        device = self._squares.device
        self._corrections = torch.ones(2, dtype=torch.float32, device=device)
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in (formula.beta1, formula.beta2)]
        self._log_betas = torch.tensor(logs, dtype=torch.float64, device=device)

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        if self._formula.bias_correction:
            adaptive_corrections_kernel[(1,)](step, self._log_betas, self._corrections)
        pairs = self._pairs if self._any_trust else None
        self._update(rates_G, grad_factor, write, self._corrections, pairs)
        if self._any_trust:
            self._add_norms(None)
            self._update(rates_G, grad_factor, write, self._corrections, second_pass=True)


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
        """Adagrad does not depend on ``step``."""
        self._update(rates_G, grad_factor, write)
