"""LAMB, AdamW and Adam in Triton: tables, launches, and which of the possible passes they make.

The ratio of a tensor depends on all of its directions u, hence LAMB passes twice over the weights. What moves least,
in bytes per parameter with gradients and weights of 2 bytes, and 4 each for master, m and v:

    scheme                                first pass                    second pass                        sum
    keep u (4 more bytes of memory)       g m v w in, m v u out = 26    u w in, w p out             = 14   40
    compute u again from the new m and v  g m v w in, m v out   = 22    m v w in, w p out           = 18   40
    norms first, write all at the end     g m v w in            = 14    g m v w in, m v w p out     = 28   42

The second is used: as few bytes as the first without its memory. With ``measure``, which reads g alone (2), an update
moves 42 bytes per parameter, and 44 with float32 weights. Without trust ratio everything is done in the first pass: 30
bytes, or 32; 26 with masters that are kept as remainders. Gradients in float32 of 16-bit weights add 2 bytes to each of
the two passes that read them. Merging ``measure`` into the first pass is impossible: m and v must not be written before
it is known that all gradients are finite, and v is not linear in the clipping factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.optim import adaptive_kernels as kernels
from common.optim.block_tables import BlockTables
from common.optim.formula_values import MomentsValues
from common.optim.rules import Binding, GroupSettings, Update
from common.optim.shard import FRAGMENT_ALIGNMENT, Shard

BLOCK = 4096  # elements for one program
MEASURED_BLOCKS = 16  # blocks for one program of the measuring pass: few enough partial sums for one program to add
CHUNK = 1024  # partial sums that are added at once
WARPS = 8


@dataclass(frozen=True)
class _GroupTables:
    """Settings by group, on the device."""

    multiplier: Tensor
    square_weight: Tensor
    decay: Tensor
    trust: Tensor


class _Work:
    """One shard with its state, its tables by block and by fragment, and its partial sums."""

    def __init__(self, shard: Shard, averages: Tensor, square_averages: Tensor) -> None:
        self.shard = shard
        self.averages = averages
        self.square_averages = square_averages
        fragments, device = shard.fragments, shard.masters.device
        tables = BlockTables(fragments, BLOCK, device)
        self.blocks = tables.count
        self.measuring_programs = -(-self.blocks // MEASURED_BLOCKS)
        self.block_start = tables.block_start
        self.block_stop = tables.by_block([f.stop for f in fragments], torch.int64)
        self.block_group = tables.by_block([f.group for f in fragments], torch.int32)
        self.block_tensor = tables.by_block([f.tensor for f in fragments], torch.int32)
        self.fragment_block = tables.fragment_block
        self.fragment_tensor = tables.fragment_tensor

        self.measured = torch.zeros((2, self.measuring_programs), dtype=torch.float32, device=device)
        self.weight_squares = torch.zeros(self.blocks, dtype=torch.float32, device=device)
        self.direction_squares = torch.zeros_like(self.weight_squares)


class TritonAdaptive(Update):
    """LAMB, AdamW and Adam in Triton: the same results as ``ReferenceAdaptive`` up to rounding.

    Raises:
        ValueError: a fragment does not start or stop on the alignment.
    """

    implementation = "triton"
    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(self, formula: MomentsValues, binding: Binding) -> None:
        super().__init__(binding)
        self._formula = formula
        self._work = [_Work(*shard) for shard in zip(self._shards, *self.states.values(), strict=True)]
        device = self._squares.device
        self._groups = _group_tables(binding.settings, device)
        self._corrections = torch.ones(2, dtype=torch.float32, device=device)
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in (formula.beta1, formula.beta2)]
        self._log_betas = torch.tensor(logs, dtype=torch.float64, device=device)

    def measure(self, stats: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        for work in self._work:
            if not work.blocks:
                continue
            squares, infinite = work.measured
            kernels.adaptive_measure_kernel[(work.measuring_programs,)](
                work.shard.gradients,
                work.block_start,
                work.block_stop,
                work.block_group,
                self._groups.square_weight,
                squares,
                infinite,
                work.blocks,
                MEASURED_BLOCKS=MEASURED_BLOCKS,
                BLOCK=BLOCK,
                ALIGNMENT=FRAGMENT_ALIGNMENT,
                num_warps=WARPS,
            )
            kernels.adaptive_stats_kernel[(1,)](squares, infinite, stats, work.measuring_programs, CHUNK=CHUNK)

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        if self._formula.bias_correction:
            kernels.adaptive_corrections_kernel[(1,)](step, self._log_betas, self._corrections)
        for work in self._work:
            if work.blocks:
                self._update_moments(work, rates_G, grad_factor, write)
        if not self._any_trust:
            return
        self._squares.zero_()
        for work in self._work:
            if work.blocks:
                self._add_norms(work)
        self._complete_squares()
        for work in self._work:
            if work.blocks:
                self._update_weights(work, rates_G, write)

    def _update_moments(self, work: _Work, rates_G: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        formula, shard, groups = self._formula, work.shard, self._groups
        kernels.adaptive_first_pass_kernel[(work.blocks,)](
            shard.parameters,
            shard.masters,
            shard.gradients,
            work.averages,
            work.square_averages,
            work.block_start,
            work.block_stop,
            work.block_group,
            groups.multiplier,
            groups.decay,
            rates_G,
            groups.trust,
            self._corrections,
            grad_factor,
            write,
            work.weight_squares,
            work.direction_squares,
            formula.beta1,
            1.0 - formula.beta1,
            formula.beta2,
            1.0 - formula.beta2,
            formula.epsilon,
            DECAY_IN_GRADIENT=formula.decay_in_gradient,
            NORM_OF_MODEL=formula.norm_of_model,
            HAS_MASTERS=shard.has_masters,
            REMAINDERS=shard.has_remainders,
            BLOCK=BLOCK,
            ALIGNMENT=FRAGMENT_ALIGNMENT,
            num_warps=WARPS,
        )

    def _add_norms(self, work: _Work) -> None:
        kernels.adaptive_norms_kernel[(work.fragment_tensor.numel(),)](
            work.weight_squares,
            work.direction_squares,
            work.fragment_tensor,
            work.fragment_block,
            self._squares,
            self._tensors,
            CHUNK=CHUNK,
        )

    def _update_weights(self, work: _Work, rates_G: Tensor, write: Tensor) -> None:
        shard, groups = work.shard, self._groups
        kernels.adaptive_second_pass_kernel[(work.blocks,)](
            shard.parameters,
            shard.masters,
            work.averages,
            work.square_averages,
            work.block_start,
            work.block_stop,
            work.block_group,
            work.block_tensor,
            groups.decay,
            rates_G,
            groups.trust,
            self._squares,
            self._corrections,
            write,
            self._tensors,
            self._formula.epsilon,
            HAS_MASTERS=shard.has_masters,
            BLOCK=BLOCK,
            ALIGNMENT=FRAGMENT_ALIGNMENT,
            num_warps=WARPS,
        )


def _group_tables(settings: Sequence[GroupSettings], device: torch.device) -> _GroupTables:
    def table(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return _GroupTables(
        multiplier=table([s.grad_multiplier for s in settings]),
        square_weight=table([s.grad_multiplier**2 * s.norm_share for s in settings]),
        decay=table([s.weight_decay for s in settings]),
        trust=torch.tensor([s.trust_ratio for s in settings], dtype=torch.int32, device=device),
    )
