# mypy: allow-untyped-defs
"""Triton kernel of a cast to FP8, with a transpose and the scale of the next use.

Memory bounds it: 2 bytes read and 1 + 1 written per element, 4 bytes at about 4.3 TB/s on an H200: 23 us for 24,576
tokens of 1,024 features. Every program loops over tiles. A tile is loaded once and stored twice; it is transposed in
shared memory so that both stores are contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl  # noqa: F401  # Triton's interpreter looks for it
from torch import Tensor

from common.ops.fp8_cast import device
from common.ops.fp8_cast.device import load_tile
from common.ops.fp8_cast.reference import SAMPLED_ROWS, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.tile import Tile
from common.ops.triton_support import programs_for


@triton.jit
def fp8_cast(given, columns, inverse, row, M, K):
    """Return the tile of x (M, K) unchanged: ``FORMULA`` of :func:`common.ops.fp8_cast.device.tiles_kernel`."""
    return ((load_tile(given[0], row, columns, M, K), 0),), ()


TILES: dict[str, Tile] = {"cast": Tile(rows=64, columns=128, warps=8, programs=4, stages=3)}
"""Tiles by pass, from a sweep at 24,576 rows of 1,024 and of 4,096 columns on an H200."""


class Output(NamedTuple):
    """A matrix that a kernel writes, in each format that is not None.

    Attributes:
        half: (T, columns) in the dtype of the activations.
        data: (T, columns) in FP8.
        transposed: transpose of ``data``, (columns, T).
        scale: 0-d fp32.
        pending: (2,) int32; None if the scale is not updated.
        scale_inverse: 0-d fp32.
    """

    columns: int = 0
    half: Tensor | None = None
    data: Tensor | None = None
    transposed: Tensor | None = None
    scale: Tensor | None = None
    pending: Tensor | None = None
    scale_inverse: Tensor | None = None

    def pointers(self) -> tuple[Tensor | None, ...]:
        """Return the arguments of a kernel for the FP8 format: bytes, scale, pending and inverse of the scale."""
        data = None if self.data is None else self.data.view(torch.uint8)
        return data, self.scale, self.pending, self.scale_inverse

    def fp8(self, of: torch.dtype) -> Fp8Tensor | None:
        """Return the matrix in FP8, or None without FP8; ``of`` is the dtype of its ``source``."""
        if self.data is None:
            return None
        assert self.scale_inverse is not None
        source = torch.empty((), dtype=of, device=self.data.device).expand(self.data.shape)
        return Fp8Tensor(self.data, self.transposed, self.scale_inverse, source)


NOTHING = Output()


def output(
    like: Tensor,
    columns: int,
    dtype: torch.dtype,
    scaling: Scaling | None,
    *,
    half: bool,
    transpose: bool = False,
    frozen_scales: bool = False,
) -> Output:
    """Allocate an output.

    Args:
        like: tensor with T rows; its dtype is that of ``half``.
        dtype: ``E4M3`` or ``E5M2``.
        scaling: scale of the FP8 format; None for an output without FP8.
        half: whether the output has the format ``half``.
        transpose: whether to store the FP8 format transposed, too.
        frozen_scales: whether the scale for the next use stays as it is.
    """
    rows = like.shape[0]
    half_form = like.new_empty((rows, columns)) if half else None
    if scaling is None:
        return Output(columns, half_form)
    return Output(
        columns,
        half_form,
        data=like.new_empty((rows, columns), dtype=dtype),
        transposed=like.new_empty((columns, rows), dtype=dtype) if transpose else None,
        scale=scaling.scale,
        pending=None if frozen_scales else scaling.pending,
        scale_inverse=like.new_empty((), dtype=torch.float32),
    )


def launch(
    formula: Any,
    tile: Tile,
    given: tuple[Any, ...],
    rows: int,
    features: int,
    written: Output,
    saved: Output = NOTHING,
    *,
    columns: Any = device.block_of_columns,
    block: int | None = None,
    blocks: int | None = None,
    own_columns: bool = False,
    sums: bool = False,
    inverse: Tensor | None = None,
    sampled_rows: int = SAMPLED_ROWS_OF_COMPUTED,
    group: int = 8,
) -> Any:
    """Launch :func:`common.ops.fp8_cast.device.tiles_kernel`.

    Args:
        formula: Triton function that computes the parts of a tile of ``written`` and of ``saved``.
        given: tensors and numbers that the formula reads.
        features: number of columns to divide into blocks of ``tile.columns``.
        columns: Triton function that returns the columns of a block, their mask, and more values for the formula.
        block, blocks: columns per tile and number of blocks; by default they follow from ``features``.
        own_columns: whether a program stays in one block of columns.
        sums: whether to return sums of ``written`` over rows.
        inverse: inverse scale of an FP8 input, 0-d fp32.
        sampled_rows: number of rows for the first scale.
        group: neighbours in a row that share a maximum.

    Returns:
        Partial sums, fp32 (programs, columns), or None without ``sums``.
    """
    block = block or min(tile.columns, triton.next_power_of_2(features))
    blocks = blocks or triton.cdiv(features, block)
    owned = blocks if own_columns else 1
    tiles = triton.cdiv(rows, tile.rows) * blocks // owned
    programs = programs_for(tiles, tile.programs, given[0].device, owned)
    partial = given[0].new_empty((programs, written.columns), dtype=torch.float32) if sums else None
    device.tiles_kernel[(programs * owned,)](
        given, inverse, written, saved, partial, rows, features,
        BLOCKS=blocks, COLUMNS=columns, FORMULA=formula, OWN_COLUMNS=own_columns, SAMPLED_ROWS=sampled_rows,
        BLOCK_T=tile.rows, BLOCK_F=block, GROUP=min(group, block), ONE_TILE=not tile.programs,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return partial


def fields_for_autograd(ctx: Any, x8: Fp8Tensor) -> tuple[Tensor | None, ...]:
    """Return an FP8 tensor's fields as results of an autograd function; only the last, ``source``, has a gradient."""
    ctx.set_materialize_grads(False)  # do not allocate zeros for the gradients of the others
    ctx.mark_non_differentiable(x8.data, x8.scale_inverse)
    return x8.data, None, x8.scale_inverse, x8.source


def cast(x_MK: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool, frozen_scales: bool = False) -> Fp8Tensor:
    """Return (M, K) cast to FP8; see :func:`common.ops.fp8_cast.reference.cast_reference`. One launch."""
    x_MK = x_MK.contiguous()
    rows, columns = x_MK.shape
    written = output(x_MK, columns, dtype, scaling, half=False, transpose=transpose, frozen_scales=frozen_scales)
    launch(
        fp8_cast, TILES["cast"], (x_MK,), rows, columns, written,
        block=TILES["cast"].columns, sampled_rows=SAMPLED_ROWS, group=1,
    )  # fmt: skip
    x8 = written.fp8(x_MK.dtype)
    assert x8 is not None
    return replace(x8, source=x_MK)
