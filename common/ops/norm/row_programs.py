"""How many programs share the rows of a layer norm."""

from __future__ import annotations

import torch
import triton

from common.ops.triton_support import multiprocessors


def row_programs(tokens: int, rows: int, per_multiprocessor: int, device: torch.device) -> int:
    """Programs of a launch.

    Args:
        tokens: rows of the matrix.
        rows: that a program holds at a time.
        per_multiprocessor: most programs of one, each visiting many groups of rows; 0 for one group a program.
        device: where it runs.
    """
    groups = triton.cdiv(tokens, rows)
    return min(groups, multiprocessors(device) * per_multiprocessor) if per_multiprocessor else groups
