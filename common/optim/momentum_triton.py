"""LARS and SGD as multi-tensor Triton kernels over shards.

Three kinds of launches per update, whatever the number of tensors: partial sums of squares for every block (one launch
per dtype), one small kernel that adds them up by fragment (one program each), and the update (one per dtype), which
computes the trust ratio of its tensor itself. Blocks never straddle fragments, so one look-up gives a block all
settings of its tensor. Sums run in a fixed order and use no atomics: the result is the same in every run. Learning
rates, sums of squares, factor and the decision to write are read from device tensors.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.optim.adaptive_kernels import VECTOR
from common.optim.block_tables import BlockTables
from common.optim.formula_values import MomentumValues
from common.optim.rules import Binding, Update
from common.optim.shard import FRAGMENT_ALIGNMENT

BLOCK = 4096  # elements for one program
CHUNK = 1024  # partial sums that are added at once
WARPS = 8


@triton.jit
def _measure_kernel(
    weights_ptr,  # [size] masters or parameters of one shard
    gradients_ptr,  # [size]
    block_fragment_ptr,  # [blocks] int32
    block_start_ptr,  # [blocks] int64
    stop_ptr,  # [fragments] int64
    trust_ptr,  # [fragments] int32
    weight_squares_ptr,  # [blocks] float32, written for tensors with a trust ratio
    gradient_squares_ptr,  # [blocks] float32
    stats_ptr,  # [2] float32, the first: a gradient is not finite
    first_block,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Partial sums of squares of one block, and whether its gradients are finite."""
    block = tl.program_id(0) + first_block
    fragment = tl.load(block_fragment_ptr + block)
    start = tl.multiple_of(tl.load(block_start_ptr + block), ALIGNMENT)
    stop = tl.multiple_of(tl.load(stop_ptr + fragment), ALIGNMENT)
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < stop
    gradients = tl.load(gradients_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    infinite = tl.max(tl.where(tl.abs(gradients) < float("inf"), 0, 1), axis=0)
    if infinite > 0:
        tl.store(stats_ptr, 1.0)  # every program that writes writes the same
    tl.store(gradient_squares_ptr + block, tl.sum(gradients * gradients, axis=0))
    if tl.load(trust_ptr + fragment) > 0:
        weights = tl.load(weights_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(weight_squares_ptr + block, tl.sum(weights * weights, axis=0))


@triton.jit
def _finish_measure_kernel(
    weight_squares_ptr,  # [blocks] float32
    gradient_squares_ptr,  # [blocks] float32
    fragment_block_ptr,  # [fragments + 1] int32, first block of each fragment
    tensor_ptr,  # [fragments] int32
    multiplier_ptr,  # [fragments] float32
    share_ptr,  # [fragments] float32
    squares_ptr,  # [2, tensors] float32: weights, mean gradients
    shares_of_norm_ptr,  # [fragments] float32
    tensors,
    CHUNK: tl.constexpr,
):
    """Add up the partial sums of one fragment, in order."""
    fragment = tl.program_id(0)
    first = tl.load(fragment_block_ptr + fragment)
    last = tl.load(fragment_block_ptr + fragment + 1)
    weight_sum = tl.zeros([CHUNK], dtype=tl.float32)
    gradient_sum = tl.zeros([CHUNK], dtype=tl.float32)
    for chunk in range(first, last, CHUNK):
        blocks = chunk + tl.arange(0, CHUNK)
        weight_sum += tl.load(weight_squares_ptr + blocks, mask=blocks < last, other=0.0)
        gradient_sum += tl.load(gradient_squares_ptr + blocks, mask=blocks < last, other=0.0)
    multiplier = tl.load(multiplier_ptr + fragment)
    gradient = tl.sum(gradient_sum, axis=0) * multiplier * multiplier
    tensor = tl.load(tensor_ptr + fragment)
    tl.store(squares_ptr + tensor, tl.sum(weight_sum, axis=0))
    tl.store(squares_ptr + tensors + tensor, gradient)
    tl.store(shares_of_norm_ptr + fragment, gradient * tl.load(share_ptr + fragment))


@triton.jit
def _update_kernel(
    parameters_ptr,  # [size], what the model computes with
    masters_ptr,  # [size] float32, the same as parameters_ptr without HAS_MASTERS
    gradients_ptr,  # [size]
    momentum_ptr,  # [size] float32
    block_fragment_ptr,  # [blocks] int32
    block_start_ptr,  # [blocks] int64
    stop_ptr,  # [fragments] int64
    tensor_ptr,  # [fragments] int32
    trust_ptr,  # [fragments] int32
    multiplier_ptr,  # [fragments] float32
    decay_ptr,  # [fragments] float32
    group_ptr,  # [fragments] int32
    inside_ptr,  # [fragments] int32
    squares_ptr,  # [2, tensors] float32, summed over shards
    rates_ptr,  # [groups] float32
    factor_ptr,  # 0-d float32
    write_ptr,  # 0-d bool
    first_block,
    tensors,
    mu,
    eta,
    epsilon,
    NESTEROV: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Trust ratio, weight decay, momentum, master and model weights of one block."""
    if tl.load(write_ptr):
        block = tl.program_id(0) + first_block
        fragment = tl.load(block_fragment_ptr + block)
        start = tl.multiple_of(tl.load(block_start_ptr + block), ALIGNMENT)
        stop = tl.multiple_of(tl.load(stop_ptr + fragment), ALIGNMENT)
        offsets = start + tl.arange(0, BLOCK)
        model_offsets = tl.max_contiguous(start + tl.arange(0, BLOCK), VECTOR)
        mask = offsets < stop
        rate = tl.load(rates_ptr + tl.load(group_ptr + fragment))
        factor = tl.load(factor_ptr)
        inside = tl.load(inside_ptr + fragment) > 0
        decay = tl.load(decay_ptr + fragment)
        tensor = tl.load(tensor_ptr + fragment)
        weight_norm = tl.sqrt(tl.load(squares_ptr + tensor))
        gradient_norm = tl.sqrt(tl.load(squares_ptr + tensors + tensor)) * factor
        defined = (tl.load(trust_ptr + fragment) > 0) & (weight_norm > 0.0) & (gradient_norm > 0.0)
        denominator = gradient_norm + decay * weight_norm + epsilon
        ratio = tl.where(defined, eta * weight_norm / tl.where(defined, denominator, 1.0), 1.0)
        weights = tl.load(masters_ptr + offsets, mask=mask, other=0.0)
        gradients = tl.load(gradients_ptr + model_offsets, mask=mask, other=0.0).to(tl.float32)
        momentum = tl.load(momentum_ptr + offsets, mask=mask, other=0.0)
        step = gradients * (tl.load(multiplier_ptr + fragment) * factor) + decay * weights
        step = step * (ratio * tl.where(inside, -rate, 1.0))
        momentum = mu * momentum + step
        direction = mu * momentum + step if NESTEROV else momentum
        weights += direction * tl.where(inside, 1.0, -rate)
        tl.store(momentum_ptr + offsets, momentum, mask=mask)
        tl.store(masters_ptr + offsets, weights, mask=mask)
        if HAS_MASTERS:
            tl.store(parameters_ptr + model_offsets, weights.to(parameters_ptr.dtype.element_ty), mask=mask)


class TritonMomentum(Update):
    """LARS and SGD in Triton: the same results as ``ReferenceMomentum`` up to rounding."""

    implementation = "triton"

    kinds = ("momentum",)

    def __init__(self, formula: MomentumValues, binding: Binding) -> None:
        super().__init__(binding)
        self._formula = formula
        fragments = [fragment for shard in self._shards for fragment in shard.fragments]
        self._fragments = len(fragments)
        self._blocks = blocks = BlockTables(fragments, BLOCK, self._squares.device)
        ends = itertools.accumulate(len(shard.fragments) for shard in self._shards)
        self._shard_block = [0, *(blocks.first_blocks[end] for end in ends)]
        settings = [binding.settings[fragment.group] for fragment in fragments]
        self._stop = blocks.table([f.stop for f in fragments], torch.int64)
        self._trust = blocks.table([s.trust_ratio for s in settings], torch.int32)
        self._inside = blocks.table([s.learning_rate_in_momentum for s in settings], torch.int32)
        self._multiplier = blocks.table([s.grad_multiplier for s in settings], torch.float32)
        self._decay = blocks.table([s.weight_decay for s in settings], torch.float32)
        self._group = blocks.table([f.group for f in fragments], torch.int32)
        self._share = blocks.table([s.norm_share for s in settings], torch.float32)
        self._weight_squares = torch.zeros(blocks.count, dtype=torch.float32, device=self._squares.device)
        self._gradient_squares = torch.zeros_like(self._weight_squares)
        self._shares_of_norm = torch.zeros(len(fragments), dtype=torch.float32, device=self._squares.device)

    def measure(self, stats: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        for shard, (first, last) in zip(self._shards, itertools.pairwise(self._shard_block), strict=True):
            if first == last:
                continue  # all of this rank's part is padding
            _measure_kernel[(last - first,)](
                shard.parameters if self._formula.norm_of_model else shard.masters,
                shard.gradients,
                self._blocks.block_fragment,
                self._blocks.block_start,
                self._stop,
                self._trust,
                self._weight_squares,
                self._gradient_squares,
                stats,
                first,
                BLOCK=BLOCK,
                ALIGNMENT=FRAGMENT_ALIGNMENT,
                num_warps=WARPS,
            )
        if self._fragments < self._tensors:
            self._squares.zero_()  # other ranks hold parts of these tensors
        if self._fragments:
            _finish_measure_kernel[(self._fragments,)](
                self._weight_squares,
                self._gradient_squares,
                self._blocks.fragment_block,
                self._blocks.fragment_tensor,
                self._multiplier,
                self._share,
                self._squares,
                self._shares_of_norm,
                self._tensors,
                CHUNK=CHUNK,
            )
        torch.sum(self._shares_of_norm, dim=0, out=stats[1])
        self._complete_squares()

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`; momentum does not depend on ``step``."""
        spans = itertools.pairwise(self._shard_block)
        for shard, momentum, (first, last) in zip(self._shards, self.states["momentum"], spans, strict=True):
            if first == last:
                continue
            _update_kernel[(last - first,)](
                shard.parameters,
                shard.masters,
                shard.gradients,
                momentum,
                self._blocks.block_fragment,
                self._blocks.block_start,
                self._stop,
                self._blocks.fragment_tensor,
                self._trust,
                self._multiplier,
                self._decay,
                self._group,
                self._inside,
                self._squares,
                rates_G,
                grad_factor,
                write,
                first,
                self._tensors,
                self._formula.momentum,
                self._formula.eta,
                self._formula.epsilon,
                NESTEROV=self._formula.nesterov,
                HAS_MASTERS=shard.has_masters,
                BLOCK=BLOCK,
                ALIGNMENT=FRAGMENT_ALIGNMENT,
                num_warps=WARPS,
            )
