"""Hidden layer of the joint network on packed rows: ``dropout(relu(f[s, b] + g[u, b]))`` for each (b, s, u).

The functions work without autograd. Backward sums over u for f and over s for g. Its input gradient must be zero
where the result is zero, so ReLU and dropout need no mask in backward. The dropout mask is that of
:mod:`common.ops.dropout`, by row and column.

Shapes: S frames, N token positions, B utterances, H width, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rnnt.packed_rows import PackedRows, row_indices
from common.ops.dropout.reference import DropoutMask, keep_rows, scale_of_kept
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen

MOST_INDICES = 1 << 32
"""Maximum number of elements that the dropout mask can index."""


class JointPasses(NamedTuple):
    """Functions without autograd; see :func:`forward_reference` and :func:`backward_reference`."""

    forward: Callable[[Tensor, Tensor, PackedRows, DropoutMask], Tensor]
    backward: Callable[[Tensor, Tensor, int, int, PackedRows, DropoutMask], tuple[Tensor, Tensor]]


def check(f_SBH: Tensor, g_NBH: Tensor, rows: PackedRows) -> None:
    """Check that tensors match the rows.

    Raises:
        ValueError: shapes or dtypes do not match, or there are too many elements for dropout.
    """
    width = f_SBH.shape[2]
    wanted = (
        (rows.most_frames, rows.utterances, width),
        (rows.most_tokens + 1, rows.utterances, width),
    )
    if (tuple(f_SBH.shape), tuple(g_NBH.shape)) != wanted or f_SBH.dtype != g_NBH.dtype:
        raise ValueError(
            f"f and g must be {wanted[0]} and {wanted[1]} and of one dtype, not {tuple(f_SBH.shape)} {f_SBH.dtype} "
            f"and {tuple(g_NBH.shape)} {g_NBH.dtype}"
        )
    if rows.capacity * width > MOST_INDICES:
        raise ValueError(
            f"{rows.capacity} rows of {width}: dropout numbers {MOST_INDICES} elements; take fewer utterances"
        )


def forward_reference(f_SBH: Tensor, g_NBH: Tensor, rows: PackedRows, dropout: DropoutMask) -> Tensor:
    """Compute the hidden layer.

    Args:
        f_SBH: the encoder's part, for each frame.
        g_NBH: the prediction network's part, for each token position 0 ... U: N = U + 1.
        dropout: dropout; row r of the result has the bits of elements r * H ... r * H + H - 1.

    Returns:
        (capacity, H) in the dtype of f: ``dropout(relu(f[s, b] + g[u, b]))``, zero in unused rows.
    """
    check(f_SBH, g_NBH, rows)
    reserved = row_indices(rows)
    h_RH = widen(f_SBH)[reserved.frame_R, reserved.utterance_R] + widen(g_NBH)[reserved.token_R, reserved.utterance_R]
    h_RH = h_RH.clamp_(min=0).masked_fill_(~reserved.exists_R[:, None], 0)
    if dropout.p:
        row_R = torch.arange(rows.capacity, device=rows.device)
        keep_RH = keep_rows(dropout.seed, dropout.site, row_R, h_RH.shape[1], dropout.p)
        h_RH = h_RH.masked_fill_(~keep_RH, 0) * scale_of_kept(dropout.p)
    return h_RH.to(f_SBH.dtype)


def backward_reference(
    dh_RH: Tensor,
    live_R: Tensor,
    frames: int,
    columns: int,
    rows: PackedRows,
    dropout: DropoutMask,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of f and g.

    Args:
        dh_RH: gradient of the result, zero where the result is zero.
        live_R: rows that exist and have a gradient, bool; all others are not read.
        frames, columns: S and N of the arguments of forward.
        rows, dropout: arguments of the forward pass.

    Returns:
        Gradients of f and g, in the dtype of ``dh_RH``; zero in padding.
    """
    reserved = row_indices(rows)
    dz_RH = widen(dh_RH).masked_fill(~live_R[:, None], 0) * scale_of_kept(dropout.p)

    def added(index_R: Tensor, size: int) -> Tensor:
        sums = dz_RH.new_zeros(size * rows.utterances, dz_RH.shape[1])
        sums.index_add_(0, index_R * rows.utterances + reserved.utterance_R, dz_RH)
        return sums.view(size, rows.utterances, -1).to(dh_RH.dtype)

    return added(reserved.frame_R, frames), added(reserved.token_R, columns)


PASSES = JointPasses(forward_reference, backward_reference)

WIDEST = 2048
"""Maximum width, because a program keeps whole rows in registers."""

JOINT = Operation(
    "joint",
    PASSES,
    {
        "triton": triton_kernels("benchmarks.rnnt.ops.joint.triton", most={"width": WIDEST}),
    },
    kernel_names=(("joint", r"^joint_"),),
    cases="benchmarks.rnnt.ops.joint.cases",
)
"""Functions: :class:`JointPasses`. Sizes of a request: ``width``."""
