"""Suppression through the Triton kernel of :mod:`common.ops.suppression.kernels`.

A sort and one launch for all pictures, on the current stream; nothing waits for the device. Shapes: B pictures,
N candidates, K kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.suppression import kernels


class Tile(NamedTuple):
    """How a program walks over the candidates of a picture.

    Attributes:
        candidates: judged at a time; it compares as many with as many.
        warps: of the program.
    """

    candidates: int
    warps: int


TILES: dict[str, Tile] = {"suppress": Tile(64, 8)}
"""``bench --sweep`` times others."""


@torch.no_grad()
def suppress(
    boxes_BN4: Tensor, score_BN: Tensor, class_BN: Tensor, threshold: float, keep: int
) -> tuple[Tensor, Tensor]:
    """See :func:`common.ops.suppression.plain.suppress_torch`, whose choice this is bit by bit."""
    pictures, candidates = score_BN.shape
    keep = min(keep, candidates)
    kept_BK = torch.empty((pictures, keep), dtype=torch.int64, device=score_BN.device)
    there_BK = torch.empty_like(kept_BK, dtype=torch.bool)
    if not kept_BK.numel():
        return kept_BK, there_BK
    order_BN = score_BN.sort(dim=1, descending=True, stable=True).indices
    tile = TILES["suppress"]
    kernels.suppression_kernel[(pictures,)](
        boxes_BN4.contiguous(), score_BN.contiguous(), class_BN.contiguous(), order_BN.contiguous(), kept_BK, there_BK,
        candidates, keep, threshold, BLOCK=tile.candidates, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return kept_BK, there_BK
