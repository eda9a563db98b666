"""Suppression with the Triton kernels of :mod:`common.ops.suppression.kernels`.

It takes a sort, unless the candidates are sorted, and one or two launches for all pictures, on the current stream. The
host never waits for the device. Shapes: B pictures, N candidates, K kept.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from common.ops.suppression import kernels
from common.ops.tile import Tile

TILES: dict[str, Tile] = {
    "suppress": Tile(candidates=64, warps=8),
    "masks": Tile(candidates=128, warps=4),
    "by_masks": Tile(candidates=32, warps=4),
}
"""Tile of each kernel. ``candidates``: candidates processed at a time; for ``by_masks`` always a word of 32."""

MASK_SHARE = 0.5
"""Masks are used if ``keep`` is at least this fraction of the candidates."""


@torch.no_grad()
def suppress(
    boxes_BN4: Tensor,
    score_BN: Tensor,
    class_BN: Tensor | None,
    threshold: float,
    keep: int,
    pixel: float = 0.0,
    presorted: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :func:`common.ops.suppression.reference.suppress_reference`. The result is bit-identical."""
    pictures, candidates = score_BN.shape
    keep = min(keep, candidates)
    kept_BK = torch.empty((pictures, keep), dtype=torch.int64, device=score_BN.device)
    there_BK = torch.empty_like(kept_BK, dtype=torch.bool)
    if not kept_BK.numel():
        return kept_BK, there_BK
    boxes_BN4, score_BN = boxes_BN4.contiguous(), score_BN.contiguous()
    # kept_BK is a placeholder for tensors that the kernels do not read
    order_BN = kept_BK if presorted else score_BN.sort(dim=1, descending=True, stable=True).indices.contiguous()
    classes_BN = kept_BK if class_BN is None else class_BN.contiguous()
    if keep < MASK_SHARE * candidates:
        tile = TILES["suppress"]
        kernels.suppression_kernel[(pictures,)](
            boxes_BN4, score_BN, classes_BN, order_BN, kept_BK, there_BK, candidates, keep, threshold,
            CLASSES=class_BN is not None, SORTED=presorted, PIXEL=pixel, BLOCK=tile.candidates, num_warps=tile.warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return kept_BK, there_BK
    words = triton.cdiv(candidates, int(kernels.WORD.value))
    mask_BWN = torch.empty((pictures, words, candidates), dtype=torch.int32, device=score_BN.device)
    tile = TILES["masks"]
    kernels.suppression_masks_kernel[(triton.cdiv(candidates, tile.candidates), words, pictures)](
        boxes_BN4, score_BN, classes_BN, order_BN, mask_BWN, candidates, words, threshold,
        CLASSES=class_BN is not None, SORTED=presorted, PIXEL=pixel, ROWS=tile.candidates, num_warps=tile.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    kernels.suppression_by_masks_kernel[(pictures,)](
        score_BN, order_BN, mask_BWN, kept_BK, there_BK, candidates, keep, words,
        SORTED=presorted, WIDTH=triton.next_power_of_2(words), num_warps=TILES["by_masks"].warps,
    )  # fmt: skip
    return kept_BK, there_BK
