"""Second stage of every sum over tokens: it adds the rows of partial sums in a fixed order, without atomics."""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 16
_CHUNK = 256


@triton.jit
def column_sums_kernel(
    partial_ptr,  # (P, C) fp32
    sums_ptr,  # (C,)
    P, C,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the column sums of a matrix of partial sums. Grid (ceil(C / BLOCK_C),)."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < C
    total = tl.zeros((CHUNK, BLOCK_C), tl.float32)
    for first in range(0, P, CHUNK):
        row = first + tl.arange(0, CHUNK)
        place = row.to(tl.int64)[:, None] * C + column[None, :]
        total += tl.load(partial_ptr + place, mask=(row < P)[:, None] & inside[None, :], other=0.0)
    tl.store(sums_ptr + column, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=inside)


def column_sums(partial_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows of fp32 partial sums, (C,) in ``dtype``."""
    rows, columns = partial_PC.shape
    sums_C = partial_PC.new_empty(columns, dtype=dtype)
    chunk = min(max(triton.next_power_of_2(rows), 2), _CHUNK)
    column_sums_kernel[(triton.cdiv(columns, _COLUMNS),)](
        partial_PC, sums_C, rows, columns, CHUNK=chunk, BLOCK_C=_COLUMNS, num_warps=4
    )
    return sums_C
