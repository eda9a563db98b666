"""Virtual paste with the Triton kernel of :mod:`benchmarks.maskrcnn.ops.paste.kernels`.

One launch per pass handles all detections; nothing waits for the device. Shapes: D detections, T runs of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.maskrcnn.ops.paste import kernels
from benchmarks.maskrcnn.ops.paste.masks import Masks
from common.ops.tile import Tile

TILES: dict[str, Tile] = {"paste": Tile(pixels=512, warps=4)}
"""``pixels``: pixels of a box that a program handles at a time."""


@torch.no_grad()
def count_runs(masks: Masks, threshold: float) -> Tensor:
    """Triton implementation; see :func:`benchmarks.maskrcnn.ops.paste.reference.count_runs_reference`."""
    counts_D = torch.empty(len(masks.there_D), dtype=torch.int32, device=masks.there_D.device)
    _launch(masks, threshold, counts_D, counts_D, writes=False)
    return counts_D


@torch.no_grad()
def write_ends(masks: Masks, threshold: float, first_D: Tensor, ends_T: Tensor) -> None:
    """Triton implementation; see :func:`benchmarks.maskrcnn.ops.paste.reference.write_ends_reference`."""
    _launch(masks, threshold, first_D.contiguous(), ends_T, writes=True)


def _launch(masks: Masks, threshold: float, first_D: Tensor, out: Tensor, *, writes: bool) -> None:
    detections, size, _ = masks.probability_DSS.shape
    if not detections:
        return
    tile = TILES["paste"]
    kernels.paste_kernel[(detections,)](
        masks.probability_DSS.contiguous(), masks.boxes_D4.contiguous(), masks.size_D2.int().contiguous(),
        masks.there_D.contiguous(), first_D, out, (size + 2) / size, threshold,
        SIZE=size, WRITES=writes, PIXELS=tile.pixels, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
