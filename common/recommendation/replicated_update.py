"""Update of rows that all ranks have, by the summed gradients of all ranks. There are few, so all are updated."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.embedding_bags import AdagradRows, Rule
from common.ops.embedding_bags.rounding import round_by_chance


@torch.no_grad()
def update_all(
    rows_RW: Tensor,
    state_RW: Tensor | None,
    gradient_RW: Tensor,
    rule: Rule,
    learning_rate: Tensor,
    grad_factor: Tensor,
    write: Tensor,
    rounding_seed: Tensor | None = None,
) -> None:
    """Update every row; a row with gradient 0 does not change.

    Args:
        rows_RW: updated in place; fp64, fp32 or fp16.
        state_RW: fp32 (fp64 for fp64 rows), updated in place; None for a rule without a state.
        gradient_RW: sums over all ids of each row, in the state's dtype.
        learning_rate: 0-d fp32, on the device.
        grad_factor: 0-d, on the device; factor on the sums.
        write: 0-d bool, on the device; if false, rows and state do not change.
        rounding_seed: 0-d int64, on the device, for stochastic rounding of fp16 rows; None rounds to nearest.
    """
    step_RW = gradient_RW * grad_factor
    if isinstance(rule, AdagradRows):
        assert state_RW is not None, "Adagrad has a state"
        added_RW = state_RW + step_RW * step_RW
        state_RW.copy_(torch.where(write, added_RW, state_RW))
        step_RW = step_RW / (added_RW.sqrt() + rule.epsilon)
    after_RW = rows_RW.to(gradient_RW.dtype) - learning_rate * step_RW
    if rounding_seed is not None and rows_RW.dtype == torch.float16:
        after_RW = round_by_chance(after_RW, rounding_seed, torch.arange(len(rows_RW), device=rows_RW.device))
    rows_RW.copy_(torch.where(write, after_RW.to(rows_RW.dtype), rows_RW))
