"""Match anchors with the Triton kernels of :mod:`common.ops.anchor_matching.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: B pictures, A anchors, capacity
for M boxes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.anchor_matching import kernels
from common.ops.anchor_matching.reference import MatchingRule
from common.ops.tile import Tile

TILES: dict[str, Tile] = {"best": Tile(anchors=256, warps=1), "match": Tile(anchors=512, warps=4)}
"""Tiles by pass. ``anchors``: anchors per program. ``best`` has one warp because it reduces over them for each box."""


def _launch(tile: Tile, anchors: int, pictures: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants of a pass."""
    block = min(tile.anchors, triton.next_power_of_2(anchors))
    return (triton.cdiv(anchors, block), pictures), {
        "BLOCK": block,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }


@torch.no_grad()
def match(anchors_A4: Tensor, boxes_BM4: Tensor, count_B: Tensor, rule: MatchingRule) -> Tensor:
    """Return the same matches as :func:`common.ops.anchor_matching.reference.match_reference`."""
    anchors_A4, boxes_BM4 = anchors_A4.float().contiguous(), boxes_BM4.float().contiguous()
    anchors, (pictures, most) = anchors_A4.shape[-2], boxes_BM4.shape[:2]
    step = anchors if anchors_A4.dim() == 3 else 0
    matched_BA = torch.empty((pictures, anchors), dtype=torch.int64, device=boxes_BM4.device)
    if not matched_BA.numel():
        return matched_BA
    count_B = count_B.contiguous()
    best_BM = matched_BA.new_zeros((pictures, most if rule.rescue else 0))
    if best_BM.numel():
        grid, constants = _launch(TILES["best"], anchors, pictures)
        kernels.anchor_matching_best_kernel[grid](
            anchors_A4, boxes_BM4, count_B, best_BM, anchors, step, most, PIXEL=rule.pixel, **constants
        )
    grid, constants = _launch(TILES["match"], anchors, pictures)
    kernels.anchor_matching_kernel[grid](
        anchors_A4, boxes_BM4, count_B, best_BM, matched_BA, anchors, step, most, rule.low, rule.high, PIXEL=rule.pixel,
        EXCLUSIVE=rule.exclusive, EVERY_BEST=rule.rescue == "every_best", OWN_BEST=rule.rescue == "own_best",
        **constants,
    )  # fmt: skip
    return matched_BA
