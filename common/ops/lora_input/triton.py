"""Dropout in front of an adapter with the Triton kernels of :mod:`common.ops.lora_input.kernels`.

All work is enqueued on the current stream, and the host never waits for the device. Shapes: T rows, E columns, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.dropout.reference import DropoutMask
from common.ops.dropout.triton import rate
from common.ops.lora_input import kernels
from common.ops.lora_input.reference import WHOLE, Region
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

_LEAST_RANK = 16
"""Smallest size of a dimension in a tensor core product. Smaller ranks are padded with zeros."""


TILES: dict[str, Tile] = {
    "dropped": Tile(rows=4, columns=1024, warps=4),
    "gradient": Tile(rows=64, columns=128, warps=4),
}
"""Tile of each pass."""


def _launch(tile: Tile, x_TE: Tensor, mask: DropoutMask, region: Region) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid, and the keyword arguments that both kernels share."""
    tokens, columns = x_TE.shape
    total = columns if region.columns_total is None else region.columns_total
    block = max(2, min(tile.columns, triton.next_power_of_2(columns)))
    return (triton.cdiv(tokens, tile.rows) * triton.cdiv(columns, block),), {
        "rows_ptr": region.rows,
        "seed_ptr": mask.seed,
        "site": mask.site,
        "T": tokens,
        "E": columns,
        "columns_total": total,
        "column_offset": region.column_offset,
        "GIVEN": region.rows is not None,
        "PAIRS": total % 2 == 0 and region.column_offset % 2 == 0,
        **rate(mask.p)._asdict(),
        "BLOCK_T": tile.rows,
        "BLOCK_E": block,
        "num_warps": tile.warps,
    }


def dropped(x_TE: Tensor, mask: DropoutMask, region: Region = WHOLE) -> Tensor:
    """See :func:`common.ops.lora_input.reference.dropped_reference`. One launch."""
    if mask.p == 0.0:
        return x_TE
    require_contiguous(x=x_TE, rows=region.rows)
    y_TE = torch.empty_like(x_TE)
    grid, arguments = _launch(TILES["dropped"], x_TE, mask, region)
    kernels.lora_input_dropped_kernel[grid](
        x_TE, inverse_rms_ptr=None, weight_ptr=None, y_ptr=y_TE, NORM=False, **arguments
    )
    return y_TE


def dropped_norm(
    residual_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor, mask: DropoutMask, region: Region = WHOLE
) -> Tensor:
    """See :func:`common.ops.lora_input.reference.dropped_norm_reference`. One launch."""
    require_contiguous(residual=residual_TE, inverse_rms=inverse_rms_T, weight=weight_E, rows=region.rows)
    y_TE = torch.empty_like(residual_TE)
    grid, arguments = _launch(TILES["dropped"], residual_TE, mask, region)
    kernels.lora_input_dropped_kernel[grid](
        residual_TE, inverse_rms_ptr=inverse_rms_T, weight_ptr=weight_E, y_ptr=y_TE, NORM=True, **arguments
    )
    return y_TE


def add_input_gradient(dx_TE: Tensor, du_Tr: Tensor, a_rE: Tensor, mask: DropoutMask, region: Region = WHOLE) -> Tensor:
    """See :func:`common.ops.lora_input.reference.add_input_gradient_reference`. One launch.

    Raises:
        ValueError: the factors have different dtypes.
    """
    require_contiguous(dx=dx_TE, du=du_Tr, a=a_rE, rows=region.rows)
    if du_Tr.dtype != a_rE.dtype:
        raise ValueError(f"the factors of a product have one dtype, not {du_Tr.dtype} and {a_rE.dtype}")
    grid, arguments = _launch(TILES["gradient"], dx_TE, mask, region)
    kernels.lora_input_gradient_kernel[grid](
        dx_TE, du_Tr, a_rE, R=a_rE.shape[0], BLOCK_R=max(_LEAST_RANK, triton.next_power_of_2(a_rE.shape[0])),
        **arguments,
    )  # fmt: skip
    return dx_TE
