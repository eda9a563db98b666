"""Casts to FP8 through the Triton kernel of :mod:`common.ops.fp8_cast.kernels`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast import kernels
from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS, Fp8Tensor, Scaling
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

TILES: dict[str, Tile] = {"cast": Tile(rows=64, columns=128, warps=8, programs=4, stages=3)}
"""The best for 24,576 rows of 1,024 and of 4,096 columns on an H200, of those that a sweep tried."""


class Result(NamedTuple):
    """FP8 that a kernel is going to write.

    Attributes:
        data: of the result.
        scaling: its scale.
        scale_inverse: 0-d fp32.
    """

    data: Tensor
    scaling: Scaling
    scale_inverse: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What such kernels take: bytes, scale, pending, inverse of the scale."""
        return self.data.view(torch.uint8), *self.scaling, self.scale_inverse

    def tensor(self, of: torch.dtype) -> Fp8Tensor:
        """The result, whose values stand for those of dtype ``of``."""
        source = torch.empty((), dtype=of, device=self.data.device).expand(self.data.shape)
        return Fp8Tensor(self.data, None, self.scale_inverse, source)


def result(scaling: Scaling, dtype: torch.dtype, shape: tuple[int, ...]) -> Result:
    """Memory for FP8 of ``shape``."""
    device = scaling.scale.device
    inverse = torch.empty((), dtype=torch.float32, device=device)
    return Result(torch.empty(shape, dtype=dtype, device=device), scaling, inverse)


def arguments(wanted: Result | None) -> tuple[Tensor | None, ...]:
    """What such kernels take for a result that may not be wanted."""
    return (None,) * 4 if wanted is None else wanted.arguments()


def outputs(ctx: Any, x8: Fp8Tensor) -> tuple[Tensor | None, ...]:
    """The fields of an FP8 tensor as results of an autograd function, of which the last, the source, has a gradient."""
    ctx.set_materialize_grads(False)  # the others' would be zeros in memory
    ctx.mark_non_differentiable(x8.data, x8.scale_inverse)
    return x8.data, None, x8.scale_inverse, x8.source


def cast(x_MK: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool, frozen_scales: bool = False) -> Fp8Tensor:
    """See :func:`common.ops.fp8_cast.reference.cast_reference`. One launch; nothing waits for the device."""
    x_MK = x_MK.contiguous()
    rows, columns = x_MK.shape
    tile = TILES["cast"]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    data_MK = torch.empty((rows, columns), dtype=dtype, device=x_MK.device)
    transposed_KM = torch.empty((columns, rows), dtype=dtype, device=x_MK.device) if transpose else None
    scale_inverse = torch.empty((), dtype=torch.float32, device=x_MK.device)
    kernels.fp8_cast_kernel[(min(tiles, tile.programs * multiprocessors(x_MK.device)),)](
        x_MK,
        data_MK.view(torch.uint8),
        data_MK.view(torch.uint8) if transposed_KM is None else transposed_KM.view(torch.uint8),
        scaling.scale, scaling.pending, scale_inverse, rows, columns,
        SAMPLED_ROWS=SAMPLED_ROWS, E5M2=dtype == E5M2, FROZEN=frozen_scales, TRANSPOSE=transpose,
        BLOCK_M=tile.rows, BLOCK_K=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return Fp8Tensor(data_MK, transposed_KM, scale_inverse, x_MK)
