"""Number of programs that share the rows of a layer norm."""

from __future__ import annotations

import torch
import triton

from common.ops.triton_support import multiprocessors


def row_programs(tokens: int, rows: int, per_multiprocessor: int, device: torch.device) -> int:
    """Return the number of programs of a launch.

    Args:
        tokens: rows of the matrix.
        rows: rows that a program holds at a time.
        per_multiprocessor: limit of programs per multiprocessor, each of which processes many groups of rows; 0 for
            one group per program.
    """
    groups = triton.cdiv(tokens, rows)
    return min(groups, multiprocessors(device) * per_multiprocessor) if per_multiprocessor else groups
