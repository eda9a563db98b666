"""Gradient of a product of heads with the Triton kernel of :mod:`common.ops.qkv_gradient.kernels`.

All work is enqueued on the current stream, and the host never waits for the device. Shapes as in
:mod:`common.ops.qkv_gradient.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.fp8_cast.reference import E5M2, Scaling
from common.ops.fp8_cast.triton import launch, output
from common.ops.qkv_gradient import kernels
from common.ops.qkv_gradient.reference import QkvGradient, check, joined
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums

TILES: dict[str, Tile] = {"join": Tile(rows=64, warps=8, programs=4, stages=3)}
"""Tile of the pass. ``rows``: tokens of one head per tile."""


def join(
    dq_THD: Tensor,
    dk_THD: Tensor,
    dv_THD: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    transpose: bool = False,
    frozen_scales: bool = False,
) -> QkvGradient:
    """See :func:`common.ops.qkv_gradient.reference.join_reference`. Two launches; only the scale uses atomics."""
    check(dq_THD, dk_THD, dv_THD)
    tokens, heads, size = dq_THD.shape
    columns = 3 * heads * size
    there_TN = joined(dq_THD, dk_THD, dv_THD)
    d_qkv = output(
        dq_THD, columns, E5M2, fp8,
        half=half and there_TN is None, transpose=transpose, frozen_scales=frozen_scales,
    )  # fmt: skip
    partial = launch(
        kernels.qkv_gradient, TILES["join"],
        (dq_THD, dk_THD, dv_THD, *dq_THD.stride()[:2], *dk_THD.stride()[:2], *dv_THD.stride()[:2]),
        tokens, tl.constexpr(size), d_qkv, columns=kernels.columns_of_head,
        block=triton.next_power_of_2(size), blocks=3 * heads, own_columns=True, sums=True,
    )  # fmt: skip
    given_TN = (d_qkv.half if there_TN is None else there_TN) if half else None
    return QkvGradient(given_TN, d_qkv.fp8(dq_THD.dtype), column_sums(partial, torch.float32))
