# mypy: allow-untyped-defs
"""The Triton kernel of the logarithm of particle counts, element by element.

1 + x is exact in fp32 for every int16 x, so the kernel needs no log1p.

At 8 volumes of 128^3 x 4 counts and 16 bit: 268 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def log_counts_kernel(
    counts_ptr,  # (count,) int16
    result_ptr,  # (count,)
    count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``log(1 + x)`` of BLOCK elements. Grid (ceil(count / BLOCK),)."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    logarithm = tl.log(tl.load(counts_ptr + offset, mask=inside, other=0).to(tl.float32) + 1.0)
    tl.store(result_ptr + offset, logarithm.to(result_ptr.dtype.element_ty), mask=inside)


TILES: dict[str, Tile] = {"forward": Tile(elements=4096, warps=4)}


def log_counts(counts_NDHWC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``log(1 + counts)``, (N, C, D, H, W) in ``dtype``.

    See :func:`benchmarks.cosmoflow.ops.log_counts.log_counts_reference`.
    """
    require_contiguous(counts=counts_NDHWC)
    logarithms = torch.empty(counts_NDHWC.shape, dtype=dtype, device=counts_NDHWC.device)
    tile, count = TILES["forward"], counts_NDHWC.numel()
    log_counts_kernel[(triton.cdiv(count, tile.elements),)](
        counts_NDHWC, logarithms, count, BLOCK=tile.elements, num_warps=tile.warps
    )
    return logarithms.movedim(-1, 1)
