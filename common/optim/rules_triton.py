"""LARS and SGD as multi-tensor Triton kernels over flat buffers.

Three kinds of launches per update, whatever the number of tensors: partial sums of squares for every block (one launch
per dtype), one small kernel that turns them into trust ratios (one program per tensor), and the update (one per dtype).
Blocks never straddle tensors, so one look-up gives a block all settings of its tensor. Sums run in a fixed order and
use no atomics: the result is the same in every run. Learning rate, trust ratios and the decision to write are read
from device tensors.

Blocks cover the padding behind a tensor too: it is zero everywhere and stays zero, and the mask then keeps a
granularity that allows vector loads.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.optim.flat import FlatBuffer

if TYPE_CHECKING:
    from common.optim.rules import GroupSettings, Momentum

BLOCK = 4096  # elements for one program
CHUNK = 1024  # partial sums that are added at once
STARTS_MULTIPLE = 64  # elements that every tensor's start is a multiple of: 256 bytes of float32
WARPS = 8


@triton.jit
def _measure_kernel(
    weights_ptr,  # [size] masters or parameters of one buffer
    gradients_ptr,  # [size]
    block_segment_ptr,  # [blocks] int32
    block_start_ptr,  # [blocks] int64
    segment_stop_ptr,  # [segments] int64
    trust_ptr,  # [segments] int32
    weight_squares_ptr,  # [blocks] float32, written for tensors with a trust ratio
    gradient_squares_ptr,  # [blocks] float32, likewise
    overflow_ptr,  # 0-d float32, zero before
    first_block,
    BLOCK: tl.constexpr,
    STARTS_MULTIPLE: tl.constexpr,
):
    """Partial sums of squares of one block, and whether its gradients are finite."""
    block = tl.program_id(0) + first_block
    segment = tl.load(block_segment_ptr + block)
    start = tl.multiple_of(tl.load(block_start_ptr + block), STARTS_MULTIPLE)
    stop = tl.multiple_of(tl.load(segment_stop_ptr + segment), STARTS_MULTIPLE)
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < stop
    gradients = tl.load(gradients_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    infinite = tl.max(tl.where(tl.abs(gradients) < float("inf"), 0, 1), axis=0)
    if infinite > 0:
        tl.store(overflow_ptr, 1.0)  # every program that writes writes the same
    if tl.load(trust_ptr + segment) > 0:
        weights = tl.load(weights_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(weight_squares_ptr + block, tl.sum(weights * weights, axis=0))
        tl.store(gradient_squares_ptr + block, tl.sum(gradients * gradients, axis=0))


@triton.jit
def _trust_ratio_kernel(
    weight_squares_ptr,  # [blocks] float32
    gradient_squares_ptr,  # [blocks] float32
    segment_block_ptr,  # [segments + 1] int32, first block of each segment
    trust_ptr,  # [segments] int32
    multiplier_ptr,  # [segments] float32
    decay_ptr,  # [segments] float32
    ratio_ptr,  # [segments] float32, written for tensors with a trust ratio
    eta,
    epsilon,
    CHUNK: tl.constexpr,
):
    """Add up the partial sums of one tensor, in order, and compute its trust ratio."""
    segment = tl.program_id(0)
    if tl.load(trust_ptr + segment) > 0:
        first = tl.load(segment_block_ptr + segment)
        last = tl.load(segment_block_ptr + segment + 1)
        weight_sum = tl.zeros([CHUNK], dtype=tl.float32)
        gradient_sum = tl.zeros([CHUNK], dtype=tl.float32)
        for chunk in range(first, last, CHUNK):
            blocks = chunk + tl.arange(0, CHUNK)
            weight_sum += tl.load(weight_squares_ptr + blocks, mask=blocks < last, other=0.0)
            gradient_sum += tl.load(gradient_squares_ptr + blocks, mask=blocks < last, other=0.0)
        weight_norm = tl.sqrt(tl.sum(weight_sum, axis=0))
        gradient_norm = tl.sqrt(tl.sum(gradient_sum, axis=0)) * tl.load(multiplier_ptr + segment)
        denominator = gradient_norm + tl.load(decay_ptr + segment) * weight_norm + epsilon
        defined = (weight_norm > 0.0) & (gradient_norm > 0.0)
        ratio = tl.where(defined, eta * weight_norm / tl.where(defined, denominator, 1.0), 1.0)
        tl.store(ratio_ptr + segment, ratio)


@triton.jit
def _update_kernel(
    parameters_ptr,  # [size], what the model computes with
    masters_ptr,  # [size] float32, the same as parameters_ptr without HAS_MASTERS
    gradients_ptr,  # [size]
    momentum_ptr,  # [size] float32
    block_segment_ptr,  # [blocks] int32
    block_start_ptr,  # [blocks] int64
    segment_stop_ptr,  # [segments] int64
    multiplier_ptr,  # [segments] float32
    decay_ptr,  # [segments] float32
    rate_scale_ptr,  # [segments] float32
    inside_ptr,  # [segments] int32
    ratio_ptr,  # [segments] float32
    learning_rate_ptr,  # 0-d float32
    write_ptr,  # 0-d bool
    first_block,
    mu,
    NESTEROV: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS_MULTIPLE: tl.constexpr,
):
    """Weight decay, momentum, master and model weights of one block."""
    if tl.load(write_ptr):
        block = tl.program_id(0) + first_block
        segment = tl.load(block_segment_ptr + block)
        start = tl.multiple_of(tl.load(block_start_ptr + block), STARTS_MULTIPLE)
        stop = tl.multiple_of(tl.load(segment_stop_ptr + segment), STARTS_MULTIPLE)
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < stop
        rate = tl.load(learning_rate_ptr) * tl.load(rate_scale_ptr + segment)
        inside = tl.load(inside_ptr + segment) > 0
        weights = tl.load(masters_ptr + offsets, mask=mask, other=0.0)
        gradients = tl.load(gradients_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        momentum = tl.load(momentum_ptr + offsets, mask=mask, other=0.0)
        step = gradients * tl.load(multiplier_ptr + segment) + tl.load(decay_ptr + segment) * weights
        step = step * (tl.load(ratio_ptr + segment) * tl.where(inside, -rate, 1.0))
        momentum = mu * momentum + step
        direction = mu * momentum + step if NESTEROV else momentum
        weights += direction * tl.where(inside, 1.0, -rate)
        tl.store(momentum_ptr + offsets, momentum, mask=mask)
        tl.store(masters_ptr + offsets, weights, mask=mask)
        if HAS_MASTERS:
            tl.store(parameters_ptr + offsets, weights.to(parameters_ptr.dtype.element_ty), mask=mask)


class TritonMomentum:
    """LARS and SGD in Triton: the same results as ``TorchMomentum`` up to rounding."""

    implementation = "triton"

    def __init__(self, rule: Momentum, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings]) -> None:
        self._rule = rule
        self._buffers = buffers
        self._momenta = [buffer.new_state() for buffer in buffers]
        self._build_tables(settings)

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """See :class:`common.optim.rules.Update`."""
        return {"momentum": self._momenta}

    def measure(self, overflow: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        overflow.zero_()
        for buffer, (first, last) in zip(self._buffers, itertools.pairwise(self._buffer_block), strict=True):
            _measure_kernel[(last - first,)](
                buffer.parameters if self._rule.norm_of_model else buffer.masters,
                buffer.gradients,
                self._block_segment,
                self._block_start,
                self._segment_stop,
                self._trust,
                self._weight_squares,
                self._gradient_squares,
                overflow,
                first,
                BLOCK=BLOCK,
                STARTS_MULTIPLE=STARTS_MULTIPLE,
                num_warps=WARPS,
            )
        if self._any_trust:
            _trust_ratio_kernel[(self._ratio.numel(),)](
                self._weight_squares,
                self._gradient_squares,
                self._segment_block,
                self._trust,
                self._multiplier,
                self._decay,
                self._ratio,
                self._rule.eta,
                self._rule.epsilon,
                CHUNK=CHUNK,
            )

    def apply(self, learning_rate: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        spans = itertools.pairwise(self._buffer_block)
        for buffer, momentum, (first, last) in zip(self._buffers, self._momenta, spans, strict=True):
            _update_kernel[(last - first,)](
                buffer.parameters,
                buffer.masters,
                buffer.gradients,
                momentum,
                self._block_segment,
                self._block_start,
                self._segment_stop,
                self._multiplier,
                self._decay,
                self._rate_scale,
                self._inside,
                self._ratio,
                learning_rate,
                write,
                first,
                self._rule.momentum,
                NESTEROV=self._rule.nesterov,
                HAS_MASTERS=buffer.has_masters,
                BLOCK=BLOCK,
                STARTS_MULTIPLE=STARTS_MULTIPLE,
                num_warps=WARPS,
            )

    def _build_tables(self, settings: Sequence[GroupSettings]) -> None:
        """Tables over the blocks and the segments of all buffers, one buffer after the other."""
        segments = [segment for buffer in self._buffers for segment in buffer.segments]
        starts = [range(segment.start, segment.stop, BLOCK) for segment in segments]
        segment_block = [0, *itertools.accumulate(len(blocks) for blocks in starts)]
        ends = itertools.accumulate(len(buffer.segments) for buffer in self._buffers)
        self._buffer_block = [0, *(segment_block[end] for end in ends)]
        of_segment = [settings[segment.group] for segment in segments]
        self._any_trust = any(s.trust_ratio for s in of_segment)

        device = self._buffers[0].device
        owners = [index for index, blocks in enumerate(starts) for _ in blocks]
        self._block_segment = torch.tensor(owners, dtype=torch.int32, device=device)
        self._block_start = torch.tensor([b for blocks in starts for b in blocks], dtype=torch.int64, device=device)
        self._segment_stop = torch.tensor([s.stop for s in segments], dtype=torch.int64, device=device)
        self._segment_block = torch.tensor(segment_block, dtype=torch.int32, device=device)
        self._trust = torch.tensor([s.trust_ratio for s in of_segment], dtype=torch.int32, device=device)
        inside = [s.learning_rate_in_momentum for s in of_segment]
        self._inside = torch.tensor(inside, dtype=torch.int32, device=device)
        self._multiplier = torch.tensor([s.grad_multiplier for s in of_segment], dtype=torch.float32, device=device)
        self._decay = torch.tensor([s.weight_decay for s in of_segment], dtype=torch.float32, device=device)
        self._rate_scale = torch.tensor([s.lr_scale for s in of_segment], dtype=torch.float32, device=device)
        self._weight_squares = torch.zeros(len(owners), dtype=torch.float32, device=device)
        self._gradient_squares = torch.zeros_like(self._weight_squares)
        self._ratio = torch.ones(len(segments), dtype=torch.float32, device=device)
