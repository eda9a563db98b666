"""Residual addition of a gated update whose dropout mask is shared by rows or by columns.

``residual + keep / (1 - p) * sigmoid(gate) * update`` (Jumper et al. 2021, supplementary section 1.11.6). The mask is a
function of a seed, the call site and the position on the axis that does not share it (:mod:`common.ops.dropout`). Ranks
that hold a part of this axis give the index of their first position, so that all degrees of dynamic axial parallelism
have the same masks.

Shapes: B samples, X Y both axes of an activation, C channels; N positions on the axis that does not share the mask.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common.ops.dropout.reference import keep_rows, scale_of_kept
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class SharedDropout(NamedTuple):
    """Parameters of a mask that all rows or all columns share.

    Attributes:
        p: probability of dropping an element; if 0, the seed is not read.
        seed: 0-d int64, on the device of the activations.
        site: number of the call site, not negative, different for each dropout of an iteration.
        shared: ``rows``: the mask has the shape (B, 1, Y, C). ``columns``: (B, X, 1, C).
        first: index of the first position that this rank holds, on the axis that does not share the mask.
        whole: number of positions of that axis on all ranks; 0 if this rank holds all of them.
    """

    p: float
    seed: Tensor
    site: int
    shared: Literal["rows", "columns"]
    first: int = 0
    whole: int = 0

    def positions(self, shape_BXYC: torch.Size) -> tuple[int, int]:
        """Return N of an activation on this rank, and on all ranks."""
        own = shape_BXYC[2 if self.shared == "rows" else 1]
        return own, self.whole or own


def dropout_add_reference(
    residual_BXYC: Tensor, update_BXYC: Tensor, gate_BXYC: Tensor | None, dropout: SharedDropout
) -> Tensor:
    """Return the sum, (B, X, Y, C), in the dtype of the residual.

    Args:
        gate_BXYC: gate before the sigmoid; None for no gate.
    """
    added_BXYC = widen(update_BXYC)
    if gate_BXYC is not None:
        added_BXYC = added_BXYC * torch.sigmoid(widen(gate_BXYC))
    if dropout.p:
        own, whole = dropout.positions(residual_BXYC.shape)
        position_BN = torch.arange(len(residual_BXYC), device=residual_BXYC.device).unsqueeze(1) * whole + dropout.first
        position_BN = position_BN + torch.arange(own, device=residual_BXYC.device)
        keep_BNC = keep_rows(dropout.seed, dropout.site, position_BN, residual_BXYC.shape[3], dropout.p)
        keep_BXYC = keep_BNC.unsqueeze(1 if dropout.shared == "rows" else 2)
        added_BXYC = torch.where(keep_BXYC, added_BXYC * scale_of_kept(dropout.p), 0.0)
    return (widen(residual_BXYC) + added_BXYC).to(residual_BXYC.dtype)


DROPOUT_ADD = Operation(
    "dropout_add",
    dropout_add_reference,
    {"triton": triton_kernels("benchmarks.openfold.ops.dropout_add.triton:dropout_add", most={"features": 4096})},
    kernel_names=(("gate, dropout and residual", r"^dropout_add_"),),
    cases="benchmarks.openfold.ops.dropout_add.cases",
)
"""Signature: ``dropout_add(residual_BXYC, update_BXYC, gate_BXYC, dropout)``. Size of a request: ``features``."""
