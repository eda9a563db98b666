"""Hidden layer of the packed joint network with the Triton kernels of :mod:`benchmarks.rnnt.ops.joint.kernels`.

Forward takes one launch, backward two, on the current stream, without synchronization. Unused rows are neither
written nor read.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.rnnt.ops.joint import kernels
from benchmarks.rnnt.ops.joint.reference import JointPasses, check
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout.triton import rate
from common.ops.tile import Tile

TILES: dict[str, Tile] = {
    "forward": Tile(frames=4, warps=2),
    "backward": Tile(frames=16, warps=2, stages=1),
    "columns": Tile(partial_sums=4, warps=4),
}
"""Tile of each pass.

- ``frames``: frames of one utterance per program. In backward, more frames give fewer partial sums;
- ``warps`` of ``backward``: with at most as many threads as elements in a row, a thread sums the same elements of all
  rows, without exchange between threads;
- ``partial_sums``: partial sums in flight."""


def forward(f_SBH: Tensor, g_NBH: Tensor, rows: PackedRows, dropout: DropoutMask) -> Tensor:
    """See :func:`benchmarks.rnnt.ops.joint.reference.forward_reference`.

    Unused rows stay uninitialised.
    """
    check(f_SBH, g_NBH, rows)
    frames, utterances, width = f_SBH.shape
    h_RH = f_SBH.new_empty(rows.capacity, width)
    tile = TILES["forward"]
    if h_RH.numel():
        kernels.joint_forward_kernel[(triton.cdiv(frames, tile.frames), utterances)](
            f_SBH.contiguous(), g_NBH.contiguous(), h_RH, *rows[:3], dropout.seed, dropout.site, utterances,
            H=width, BLOCK_H=_block(width), BLOCK_S=tile.frames, **rate(dropout.p)._asdict(), num_warps=tile.warps,
        )  # fmt: skip
    return h_RH


def backward(
    dh_RH: Tensor,
    live_R: Tensor,
    frames: int,
    columns: int,
    rows: PackedRows,
    dropout: DropoutMask,
) -> tuple[Tensor, Tensor]:
    """See :func:`benchmarks.rnnt.ops.joint.reference.backward_reference`."""
    utterances, width = rows.utterances, dh_RH.shape[1]
    df_SBH, dg_NBH = dh_RH.new_empty(frames, utterances, width), dh_RH.new_empty(columns, utterances, width)
    tile = TILES["backward"]
    partial_PH = dh_RH.new_empty(
        (rows.capacity // tile.frames + utterances * (columns + 1) + 1, width), dtype=torch.float32
    )
    shared = {
        "H": width, "BLOCK_H": _block(width), "BLOCK_S": tile.frames, "INVERSE_KEEP": rate(dropout.p).INVERSE_KEEP,
    }  # fmt: skip
    if width and utterances:
        dh_RH = dh_RH.contiguous()
        kernels.joint_backward_kernel[(triton.cdiv(frames, tile.frames), utterances)](
            dh_RH, live_R, df_SBH, partial_PH, *rows[:3], frames, columns, utterances,
            STAGES=tile.stages, num_warps=tile.warps, **shared,
        )  # fmt: skip
        sums = TILES["columns"]
        kernels.joint_columns_kernel[(columns, utterances)](
            partial_PH, dg_NBH, *rows[:3], columns, utterances,
            TOGETHER=sums.partial_sums, num_warps=sums.warps, **shared,
        )  # fmt: skip
    return df_SBH, dg_NBH


def _block(width: int) -> int:
    return max(triton.next_power_of_2(width), 2)


PASSES = JointPasses(forward, backward)
