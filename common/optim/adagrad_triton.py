"""Adagrad as a multi-tensor Triton kernel over shards.

``measure`` is that of LAMB and Adam, whose kernels read the gradients alone. The update moves, with gradients and
weights of 2 bytes, 20 bytes per parameter: g w s in, w s and the model's weight out. Root and quotient are rounded
correctly, so that the first update of an element has the size of the learning rate.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.optim.adaptive_kernels import VECTOR, adaptive_measure_kernel, adaptive_stats_kernel
from common.optim.block_tables import BlockTables
from common.optim.rules import Binding, Update
from common.optim.shard import FRAGMENT_ALIGNMENT, Shard

BLOCK = 4096  # elements for one program
MEASURED_BLOCKS = 16  # blocks for one program of the measuring pass
CHUNK = 1024  # partial sums that are added at once
WARPS = 8


@triton.jit
def adagrad_kernel(
    parameters_ptr,  # [size], what the model computes with
    masters_ptr,  # [size] float32, the same as parameters_ptr without HAS_MASTERS
    gradients_ptr,  # [size]
    sums_ptr,  # [size] float32
    block_start_ptr,  # [blocks] int64
    block_stop_ptr,  # [blocks] int64
    block_group_ptr,  # [blocks] int32
    multiplier_ptr,  # [groups] float32
    decay_ptr,  # [groups] float32
    rates_ptr,  # [groups] float32
    grad_factor_ptr,  # 0-d float32
    write_ptr,  # 0-d bool
    epsilon,
    HAS_MASTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Sums of squares, masters and model weights of one block."""
    if tl.load(write_ptr):
        block = tl.program_id(0)
        start = tl.multiple_of(tl.load(block_start_ptr + block), ALIGNMENT)
        stop = tl.multiple_of(tl.load(block_stop_ptr + block), ALIGNMENT)
        group = tl.load(block_group_ptr + block)
        offsets = start + tl.arange(0, BLOCK)
        model_offsets = tl.max_contiguous(start + tl.arange(0, BLOCK), VECTOR)
        mask = offsets < stop
        gradients = tl.load(gradients_ptr + model_offsets, mask=mask, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + offsets, mask=mask, other=0.0)
        weights = tl.load(masters_ptr + offsets, mask=mask, other=0.0)
        gradients *= tl.load(multiplier_ptr + group) * tl.load(grad_factor_ptr)
        gradients += tl.load(decay_ptr + group) * weights
        sums += gradients * gradients
        weights -= tl.load(rates_ptr + group) * tl.div_rn(gradients, tl.sqrt_rn(sums) + epsilon)
        tl.store(sums_ptr + offsets, sums, mask=mask)
        tl.store(masters_ptr + offsets, weights, mask=mask)
        if HAS_MASTERS:
            tl.store(parameters_ptr + model_offsets, weights.to(parameters_ptr.dtype.element_ty), mask=mask)


class HasEpsilon(Protocol):
    """The hyperparameter of :class:`common.optim.adagrad.Adagrad`."""

    @property
    def epsilon(self) -> float: ...


class _Work:
    """One shard with its state, its tables by block, and its partial sums."""

    def __init__(self, shard: Shard, sums: Tensor) -> None:
        self.shard, self.sums = shard, sums
        fragments, device = shard.fragments, shard.masters.device
        tables = BlockTables(fragments, BLOCK, device)
        self.blocks = tables.count
        self.block_start = tables.block_start
        self.block_stop = tables.by_block([f.stop for f in fragments], torch.int64)
        self.block_group = tables.by_block([f.group for f in fragments], torch.int32)
        self.measuring_programs = -(-self.blocks // MEASURED_BLOCKS)
        self.measured = torch.zeros((2, self.measuring_programs), dtype=torch.float32, device=device)


class TritonAdagrad(Update):
    """Adagrad in Triton: the same results as ``ReferenceAdagrad`` up to rounding.

    Raises:
        ValueError: a fragment does not start or stop on the alignment.
    """

    implementation = "triton"
    kinds = ("sum",)

    def __init__(self, formula: HasEpsilon, binding: Binding) -> None:
        super().__init__(binding)
        self._epsilon = formula.epsilon
        work = [_Work(*shard) for shard in zip(self._shards, self.states["sum"], strict=True)]
        self._work = [w for w in work if w.blocks]  # where all of this rank's part is padding, nothing is launched
        settings, device = binding.settings, self._squares.device

        def table(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._multiplier = table([s.grad_multiplier for s in settings])
        self._square_weight = table([s.grad_multiplier**2 * s.norm_share for s in settings])
        self._decay = table([s.weight_decay for s in settings])

    def measure(self, stats: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        for work in self._work:
            squares, infinite = work.measured
            adaptive_measure_kernel[(work.measuring_programs,)](
                work.shard.gradients,
                work.block_start,
                work.block_stop,
                work.block_group,
                self._square_weight,
                squares,
                infinite,
                work.blocks,
                MEASURED_BLOCKS=MEASURED_BLOCKS,
                BLOCK=BLOCK,
                ALIGNMENT=FRAGMENT_ALIGNMENT,
                num_warps=WARPS,
            )
            adaptive_stats_kernel[(1,)](squares, infinite, stats, work.measuring_programs, CHUNK=CHUNK)

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`; Adagrad does not depend on ``step``."""
        for work in self._work:
            adagrad_kernel[(work.blocks,)](
                work.shard.parameters,
                work.shard.masters,
                work.shard.gradients,
                work.sums,
                work.block_start,
                work.block_stop,
                work.block_group,
                self._multiplier,
                self._decay,
                rates_G,
                grad_factor,
                write,
                self._epsilon,
                HAS_MASTERS=work.shard.has_masters,
                BLOCK=BLOCK,
                ALIGNMENT=FRAGMENT_ALIGNMENT,
                num_warps=WARPS,
            )
