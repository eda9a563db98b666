"""Multi-tensor Triton kernels over shards, which take an update rule as a function, and one that scales a buffer.

One program updates one block of a fragment. Blocks never straddle fragments, so that a block has one tensor and one
group. Sums run in a fixed order and use no atomics: the result is the same in every run. Learning rates, sums of
squares, factor and the decision to write are read from device tensors.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.optim.buffers import FRAGMENT_ALIGNMENT
from common.optim.rules import Binding, Update

BLOCK = 4096  # elements for one program
MEASURED_BLOCKS = 16  # blocks for one program of the measuring pass: few enough partial sums for one program to add
CHUNK = 1024  # partial sums that are added at once
WARPS = 8

ALIGNMENT = tl.constexpr(FRAGMENT_ALIGNMENT)

# Elements of the model's dtype that a thread loads or stores at once. Without the bound 16-bit tensors would take 8 and
# force the layout on the float32 tensors beside them, whose accesses would then leave gaps, with copies through shared
# memory between loads and stores.
VECTOR = tl.constexpr(4)

# Columns of the table of blocks behind start and stop, and of the table of groups.
GROUP, TENSOR, BLOCK_COLUMNS = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
MULTIPLIER, SQUARE_WEIGHT, DECAY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TRUST, RATE_INSIDE, SHARE, GROUP_COLUMNS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


@triton.jit
def offsets_of(block_ptr, BLOCK: tl.constexpr):
    """Return the offsets of a block's elements, the same with a vector hint for 16-bit accesses, and their mask."""
    start = tl.multiple_of(tl.load(block_ptr), ALIGNMENT)
    stop = tl.multiple_of(tl.load(block_ptr + 1), ALIGNMENT)
    offsets = start + tl.arange(0, BLOCK)
    return offsets, tl.max_contiguous(start + tl.arange(0, BLOCK), VECTOR), offsets < stop


@triton.jit
def multi_tensor_measure_kernel(
    gradients_ptr,  # [size]
    blocks_ptr,  # [blocks, BLOCK_COLUMNS] int64
    groups_ptr,  # [groups, GROUP_COLUMNS] float32
    measured_ptr,  # [programs, 2] float32, written: weighted squares, whether a gradient is not finite
    first_block,
    stop_block,
    MEASURED_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the weighted sum of squares of the gradients of some blocks, and whether all are finite."""
    program = tl.program_id(0)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    infinite = tl.zeros([BLOCK], dtype=tl.int32)
    first = first_block + program * MEASURED_BLOCKS
    for block in range(first, tl.minimum(first + MEASURED_BLOCKS, stop_block)):
        block_ptr = blocks_ptr + block * BLOCK_COLUMNS
        offsets, _, mask = offsets_of(block_ptr, BLOCK)
        weight = tl.load(groups_ptr + tl.load(block_ptr + GROUP) * GROUP_COLUMNS + SQUARE_WEIGHT)
        gradients = tl.load(gradients_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        squares += gradients * gradients * weight
        infinite = tl.where(tl.abs(gradients) < float("inf"), infinite, 1)
    tl.store(measured_ptr + 2 * program, tl.sum(squares, axis=0))
    tl.store(measured_ptr + 2 * program + 1, tl.max(infinite, axis=0).to(tl.float32))


@triton.jit
def _sums_of_pairs(pairs_ptr, first, last, CHUNK: tl.constexpr):
    one = tl.zeros([CHUNK], dtype=tl.float32)
    other = tl.zeros([CHUNK], dtype=tl.float32)
    for chunk in range(first, last, CHUNK):
        entries = chunk + tl.arange(0, CHUNK)
        one += tl.load(pairs_ptr + 2 * entries, mask=entries < last, other=0.0)
        other += tl.load(pairs_ptr + 2 * entries + 1, mask=entries < last, other=0.0)
    return tl.sum(one, axis=0), tl.sum(other, axis=0)


@triton.jit
def multi_tensor_stats_kernel(
    measured_ptr,  # [programs, 2] float32
    stats_ptr,  # [2] float32, added to
    programs,
    CHUNK: tl.constexpr,
):
    """Add up, in order, the results of the programs of the measuring pass."""
    squares, infinite = _sums_of_pairs(measured_ptr, 0, programs, CHUNK)
    tl.store(stats_ptr, tl.load(stats_ptr) + infinite)
    tl.store(stats_ptr + 1, tl.load(stats_ptr + 1) + squares)


@triton.jit
def multi_tensor_norms_kernel(
    pairs_ptr,  # [blocks, 2] float32: squares of weights, and of the gradients or directions in the trust ratio
    blocks_ptr,  # [blocks, BLOCK_COLUMNS] int64
    groups_ptr,  # [groups, GROUP_COLUMNS] float32
    fragment_block_ptr,  # [fragments + 1] int32, first block of each fragment
    squares_ptr,  # [2, tensors] float32, written at this fragment's tensor
    shares_ptr,  # [fragments] float32, written; None if the second squares are not of gradients
    tensors,
    CHUNK: tl.constexpr,
):
    """Add up the partial sums of one fragment, in order."""
    fragment = tl.program_id(0)
    first = tl.load(fragment_block_ptr + fragment)
    weights, others = _sums_of_pairs(pairs_ptr, first, tl.load(fragment_block_ptr + fragment + 1), CHUNK)
    block_ptr = blocks_ptr + first * BLOCK_COLUMNS
    if shares_ptr is not None:
        group_ptr = groups_ptr + tl.load(block_ptr + GROUP) * GROUP_COLUMNS
        multiplier = tl.load(group_ptr + MULTIPLIER)
        others = others * multiplier * multiplier
        tl.store(shares_ptr + fragment, others * tl.load(group_ptr + SHARE))
    square_ptr = squares_ptr + tl.load(block_ptr + TENSOR)
    tl.store(square_ptr, weights)
    tl.store(square_ptr + tensors, others)


@triton.jit
def _store_weights(parameters_ptr, masters_ptr, averages_ptr, share_ptr, offsets, model_offsets, weights, mask):
    """Store masters and their rounded values, or their two parts (common.optim.buffers.split_masters), and averages."""
    if averages_ptr is not None:  # the formula of torch.lerp, with the same fused multiply-adds
        average, share = tl.load(averages_ptr + offsets, mask=mask, other=0.0), tl.load(share_ptr)
        towards_weights = tl.fma(weights - average, share, average)
        back_from_weights = tl.fma(average - weights, 1.0 - share, weights)
        tl.store(averages_ptr + offsets, tl.where(share < 0.5, towards_weights, back_from_weights), mask=mask)
    if masters_ptr.dtype.element_ty == tl.int16:
        bits = weights.to(tl.int32, bitcast=True)
        nearest = ((bits + 32768) >> 16).to(tl.int16)
        tl.store(parameters_ptr + model_offsets, nearest.to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(masters_ptr + model_offsets, bits.to(tl.int16), mask=mask)
    else:
        tl.store(masters_ptr + offsets, weights, mask=mask)
        if parameters_ptr is not None:
            tl.store(parameters_ptr + model_offsets, weights.to(parameters_ptr.dtype.element_ty), mask=mask)


@triton.jit
def multi_tensor_update_kernel(
    parameters_ptr,  # [size], the parameters of the model; None if they are the masters themselves
    masters_ptr,  # [size] float32; int16 if masters are kept as remainders of bfloat16 parameters
    gradients_ptr,  # [size]; None in a second pass, which writes the weights of groups with a trust ratio
    first_ptr,  # [size] float32, a state
    second_ptr,  # [size] float32; None for rules with one state
    blocks_ptr,  # [blocks, BLOCK_COLUMNS] int64
    groups_ptr,  # [groups, GROUP_COLUMNS] float32
    pairs_ptr,  # [blocks, 2] float32, written, instead of weights, for groups with a trust ratio; None in a last pass
    squares_ptr,  # [2, tensors] float32, summed over shards
    rates_ptr,  # [groups] float32
    factor_ptr,  # 0-d float32
    write_ptr,  # 0-d bool
    extra_ptr,  # further values of the rule, such as bias corrections, or None
    averages_ptr,  # [size] float32, averages of the weights; None if there are none
    share_ptr,  # 0-d float32, share of the new weights in the averages; None without averages
    first_block,
    tensors,
    RULE: tl.constexpr,  # updates the state; returns the direction and its factor
    FORMULA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update state, masters and model weights of one block."""
    block = first_block + tl.program_id(0)
    write = tl.load(write_ptr)
    if gradients_ptr is None:
        # Backwards: data that the first pass read last are still in the L2 cache; with many ranks the whole shard is.
        block = first_block + tl.num_programs(0) - 1 - tl.program_id(0)
    block_ptr = blocks_ptr + block * BLOCK_COLUMNS
    group = tl.load(block_ptr + GROUP)
    group_ptr = groups_ptr + group * GROUP_COLUMNS
    if gradients_ptr is None:
        write = write & (tl.load(group_ptr + TRUST) > 0)
    if write:
        offsets, model_offsets, mask = offsets_of(block_ptr, BLOCK)
        if masters_ptr.dtype.element_ty == tl.int16:  # common.optim.buffers.joined_masters
            high = tl.load(parameters_ptr + model_offsets, mask=mask, other=0.0).to(tl.int16, bitcast=True)
            low = tl.load(masters_ptr + model_offsets, mask=mask, other=0).to(tl.int32)
            weights = ((high.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
        else:
            weights = tl.load(masters_ptr + offsets, mask=mask, other=0.0)
        gradients, factor = None, None
        if gradients_ptr is not None:
            factor = tl.load(factor_ptr)
            gradients = tl.load(gradients_ptr + model_offsets, mask=mask, other=0.0).to(tl.float32)
            gradients *= tl.load(group_ptr + MULTIPLIER) * factor
        rate = tl.load(rates_ptr + group)
        square_ptr = squares_ptr + tl.load(block_ptr + TENSOR)
        direction, rate = RULE(
            gradients,
            weights,
            first_ptr,
            second_ptr,
            offsets,
            mask,
            group_ptr,
            square_ptr,
            tensors,
            rate,
            factor,
            extra_ptr,
            FORMULA,
        )
        if pairs_ptr is None:
            weights -= rate * direction
            _store_weights(parameters_ptr, masters_ptr, averages_ptr, share_ptr, offsets, model_offsets, weights, mask)
        elif tl.load(group_ptr + TRUST) > 0:
            normed = weights
            if FORMULA.norm_of_model and parameters_ptr is not None:
                # Rounding the master again is cheaper than reading its rounded value.
                normed = weights.to(parameters_ptr.dtype.element_ty).to(tl.float32)
            tl.store(pairs_ptr + 2 * block, tl.sum(normed * normed, axis=0))
            tl.store(pairs_ptr + 2 * block + 1, tl.sum(direction * direction, axis=0))
        else:
            weights -= rate * direction
            _store_weights(parameters_ptr, masters_ptr, averages_ptr, share_ptr, offsets, model_offsets, weights, mask)


class MultiTensorUpdate(Update):
    """Tables, partial sums and launches.

    Raises:
        ValueError: a fragment does not start or stop on the alignment.
    """

    implementation = "triton"
    rule: Any
    """Jitted function that updates the state of a block. It returns a direction and the factor to subtract it with."""

    def __init__(self, formula: Any, binding: Binding) -> None:
        super().__init__(binding)
        self._formula = formula
        device = self._squares.device
        blocks: list[tuple[int, ...]] = []
        fragment_block = [0]
        self._parts = []
        self._averages: Sequence[Tensor | None] = [None] * len(self._shards)
        self._share: Tensor | None = None
        for index, (shard, *states) in enumerate(zip(self._shards, *self.states.values(), strict=True)):
            first = len(blocks)
            for f in shard.fragments:
                if f.start % FRAGMENT_ALIGNMENT or f.stop % FRAGMENT_ALIGNMENT:
                    raise ValueError(
                        f"the fragment of tensor {f.tensor} spans {f.start} to {f.stop}: "
                        f"both must be multiples of {FRAGMENT_ALIGNMENT}"
                    )
                # Blocks cover the padding behind a fragment too: it is zero everywhere and stays zero, and the mask
                # then keeps a granularity that allows vector loads.
                blocks += [(start, f.stop, f.group, f.tensor) for start in range(f.start, f.stop, BLOCK)]
                fragment_block.append(len(blocks))
            if first < len(blocks):  # where all of this rank's part is padding, nothing is launched
                self._parts.append((index, shard, states, first, len(blocks)))
        groups = [
            (
                s.grad_multiplier,
                s.grad_multiplier**2 * s.norm_share,
                s.weight_decay,
                s.trust_ratio,
                s.learning_rate_in_momentum,
                s.norm_share,
            )
            for s in binding.settings
        ]
        self._blocks = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._groups = torch.tensor(groups, dtype=torch.float32, device=device)
        self._fragment_block = torch.tensor(fragment_block, dtype=torch.int32, device=device)
        self._fragments = len(fragment_block) - 1
        self._measured, self._pairs = torch.zeros((2, len(blocks), 2), dtype=torch.float32, device=device)

    def average_into(self, averages: Sequence[Tensor], share: Tensor) -> bool:
        """Return True, unless it averages into other tensors already."""
        if self._share is not None:
            return False
        self._averages, self._share = averages, share
        return True

    def measure(self, stats: Tensor) -> None:
        for _, shard, _, first, last in self._parts:
            programs = -(-(last - first) // MEASURED_BLOCKS)
            multi_tensor_measure_kernel[(programs,)](
                shard.gradients,
                self._blocks,
                self._groups,
                self._measured,
                first,
                last,
                MEASURED_BLOCKS=MEASURED_BLOCKS,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
            multi_tensor_stats_kernel[(1,)](self._measured, stats, programs, CHUNK=CHUNK)

    def _add_norms(self, shares: Tensor | None) -> None:
        """Sum the pairs to squares by tensor, over all shards."""
        if self._fragments < self._tensors:
            self._squares.zero_()  # other ranks hold parts of these tensors
        if self._fragments:
            multi_tensor_norms_kernel[(self._fragments,)](
                self._pairs,
                self._blocks,
                self._groups,
                self._fragment_block,
                self._squares,
                shares,
                self._tensors,
                CHUNK=CHUNK,
            )
        self._complete_squares()

    def _update(
        self,
        rates_G: Tensor,
        grad_factor: Tensor,
        write: Tensor,
        extra: Tensor | None = None,
        pairs: Tensor | None = None,
        second_pass: bool = False,
    ) -> None:
        for index, shard, states, first, last in self._parts:
            multi_tensor_update_kernel[(last - first,)](
                shard.parameters if shard.has_masters else None,
                shard.masters,
                None if second_pass else shard.gradients,
                states[0],
                states[1] if states[1:] else None,
                self._blocks,
                self._groups,
                pairs,
                self._squares,
                rates_G,
                grad_factor,
                write,
                extra,
                self._averages[index],
                self._share,
                first,
                self._tensors,
                RULE=self.rule,
                FORMULA=self._formula,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )


@triton.jit
def _scale_kernel(
    x_ptr,  # (count,)
    factor_ptr,  # 0-d float32
    result_ptr,  # (count,); may be x
    count,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store ``factor * x`` of BLOCK elements, or add it to the result if ADD. Grid (ceil(count / BLOCK),)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    y = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    if ADD:
        y += tl.load(result_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(result_ptr + offsets, y.to(result_ptr.dtype.element_ty), mask=inside)


def scale(x: Tensor, factor: Tensor, result: Tensor, add: bool) -> None:
    """Compute ``result = factor * x``, or ``result += factor * x`` with ``add``.

    PyTorch's product with a 0-d tensor of another dtype is not vectorised: 336 million bf16 elements take 1.27 ms on an
    H200, where the memory bandwidth allows 0.31 ms.

    Args:
        x, result: contiguous, with equal numbers of elements, in fp32 or a half precision. They may be the same
            tensor.
        factor: 0-d fp32.
    """
    assert x.is_contiguous()
    assert result.is_contiguous()
    assert factor.dtype == torch.float32
    count = x.numel()
    _scale_kernel[(triton.cdiv(count, BLOCK),)](x, factor, result, count, ADD=add, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _add_pieces_kernel(
    own_ptr,  # (count,)
    staged_ptr,  # (PIECES, count) with stride ``stride``
    result_ptr,  # (count,); may be one of the staged pieces
    factor_ptr,  # 0-d float32; None to multiply nothing
    factors_ptr,  # (PIECES,) float32
    count,
    stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the own and the staged gradients of BLOCK elements in float32. Grid (ceil(count / BLOCK),)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(own_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        total = (total * tl.load(factor_ptr)).to(own_ptr.dtype.element_ty).to(tl.float32)
    for piece in tl.static_range(PIECES):
        gradients = tl.load(staged_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if factor_ptr is not None:
            gradients *= tl.load(factors_ptr + piece)
            gradients = gradients.to(own_ptr.dtype.element_ty).to(tl.float32)
        total += gradients
        staged_ptr += stride
    tl.store(result_ptr + offsets, total.to(result_ptr.dtype.element_ty), mask=inside)


def add_pieces(own: Tensor, staged: Tensor, result: Tensor, factor: Tensor | None, factors: Tensor) -> None:
    """Add gradients of several ranks; see :func:`common.optim.peer_exchange.add_pieces`. The factors are fp32."""
    assert own.is_contiguous()
    assert result.is_contiguous()
    assert staged.stride(1) == 1
    pieces, count = staged.shape
    _add_pieces_kernel[(triton.cdiv(count, BLOCK),)](
        own,
        staged,
        result,
        factor,
        factors,
        count,
        staged.stride(0),
        PIECES=pieces,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,  # a product is rounded before it is added
    )
