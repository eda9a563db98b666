"""Mask targets with the Triton kernel of :mod:`benchmarks.maskrcnn.ops.mask_targets.kernels`.

One launch handles all RoIs; nothing waits for the device. Shapes: R RoIs, S rows and columns.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.maskrcnn.ops.mask_targets import kernels
from benchmarks.maskrcnn.ops.mask_targets.reference import MOST_ROWS
from benchmarks.maskrcnn.polygon_table import PolygonTable
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"targets": Tile(edges=32, warps=2)}
"""``edges``: edges of a polygon that a program handles at a time."""


@torch.no_grad()
def mask_targets(table: PolygonTable, object_R: Tensor, boxes_R4: Tensor, transform_R4: Tensor, size: int) -> Tensor:
    """See :func:`benchmarks.maskrcnn.ops.mask_targets.reference.mask_targets_reference`; bit-identical to it.

    Raises:
        ValueError: a mask has more than :data:`MOST_ROWS` rows.
    """
    if size > MOST_ROWS:
        raise ValueError(f"masks have at most {MOST_ROWS} rows, not {size}")
    target_RSS = torch.empty((len(object_R), size, size), dtype=torch.uint8, device=object_R.device)
    if not target_RSS.numel():
        return target_RSS
    columns = table.object_bounds, table.polygon_bounds, table.xy
    require_contiguous(object_bounds=columns[0], polygon_bounds=columns[1], xy=columns[2])
    tile = TILES["targets"]
    kernels.mask_targets_kernel[(len(object_R),)](
        *columns, object_R.contiguous(), boxes_R4.contiguous(), transform_R4.contiguous(), target_RSS,
        SIZE=size, COLUMNS=triton.next_power_of_2(size), EDGES=tile.edges,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return target_RSS
