"""Rotary positions with the Triton kernels of :mod:`common.ops.rope.kernels`.

All work is enqueued on the current stream, and the host never waits for the device. Shapes as in
:mod:`common.ops.rope.reference`.
"""

from __future__ import annotations

import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import arguments, result
from common.ops.rope import kernels
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors, require_contiguous

TILES: dict[str, Tile] = {"forward": Tile(rows=32, warps=4, programs=0), "backward": Tile(rows=32, warps=4, programs=7)}
"""Tile of each pass."""


def forward(
    qkv_TN: Tensor, cos_TD2: Tensor, sin_TD2: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`common.ops.rope.reference.forward_reference`. One launch."""
    require_contiguous(qkv=qkv_TN, cos=cos_TD2, sin=sin_TD2)
    tokens, half = cos_TD2.shape
    tile = TILES["forward"]
    q_THD = qkv_TN.new_empty((tokens, heads, 2 * half))
    k_TKD, v_TKD = (qkv_TN.new_empty((tokens, kv_heads, 2 * half)) for _ in range(2))
    kernels.rope_forward_kernel[(triton.cdiv(tokens, tile.rows) * (heads + 2 * kv_heads),)](
        qkv_TN, cos_TD2, sin_TD2, q_THD, k_TKD, v_TKD, tokens,
        H=heads, K=kv_heads, HALF_D=half, BLOCK_T=tile.rows, BLOCK_D=triton.next_power_of_2(half), num_warps=tile.warps,
    )  # fmt: skip
    return q_THD, k_TKD, v_TKD


def backward(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    cos_TD2: Tensor,
    sin_TD2: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """See :func:`common.ops.rope.reference.backward_reference`. One launch."""
    require_contiguous(dq=dq_THD, dk=dk_TKD, dv=dv_TKD, cos=cos_TD2, sin=sin_TD2)
    tokens, heads, size = dq_THD.shape
    kv_heads = dk_TKD.shape[1]
    all_heads = heads + 2 * kv_heads
    tile = TILES["backward"]
    block = triton.next_power_of_2(size // 2)
    d_qkv_TN = dq_THD.new_empty((tokens, all_heads * size)) if half else None
    d_qkv8 = None if fp8 is None else result(fp8, E5M2, (tokens, all_heads * size))
    programs = min(triton.cdiv(tokens, tile.rows) * all_heads, tile.programs * multiprocessors(dq_THD.device))
    kernels.rope_backward_kernel[(programs,)](
        dq_THD, dk_TKD, dv_TKD, cos_TD2, sin_TD2, d_qkv_TN, *arguments(d_qkv8), tokens,
        H=heads, K=kv_heads, HALF=half, FP8=d_qkv8 is not None, FROZEN=frozen_scales,
        SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED,
        HALF_D=size // 2, BLOCK_T=tile.rows, BLOCK_D=block, GROUP=min(8, block), num_warps=tile.warps,
    )  # fmt: skip
    return d_qkv_TN, None if d_qkv8 is None else d_qkv8.tensor(dq_THD.dtype)
