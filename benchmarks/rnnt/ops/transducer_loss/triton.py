"""The transducer's loss through the Triton kernels beside this file, with products of our own or of a library.

Everything is enqueued on the current stream, nothing waits for the device, and nothing is added up by atomics. Rows
that do not exist are not read, and only written where a caller or the library's products want zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.rnnt.ops.transducer_loss import kernels, product_kernels
from benchmarks.rnnt.ops.transducer_loss.passes import NO_ROW, Chosen, LossPasses, Recursion, Statistics, Transitions
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors, require_contiguous

BLOCK = 1024
"""Rows of a program that looks at no logits."""
CLEARED = 8192
"""Elements that a program clears at a time."""
ROUNDED_TO_ZERO = 2.0**-25
"""What fp16 rounds to zero, and what is below it."""


TILES: dict[str, Tile] = {
    "statistics": Tile(elements=4096, warps=4),
    "gradient": Tile(elements=4096, warps=8, programs=4, stages=2),
    "recursion": Tile(lanes=128, stages=8),
    "product": Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1, flatten=1, described=1),
    "input_gradient": Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1, flatten=1, described=1),
    "weight_gradient": Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1, flatten=0, described=1),
    "some_input_gradient": Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1, flatten=0, described=1),
    "some_weight_gradient": Tile(
        rows=128, columns=256, depth=64, warps=8, stages=5, programs=1, flatten=0, described=0
    ),
}
"""Pass to its tile; ``some_``: of chosen rows.

- ``lanes``: most tokens of a warp in ``recursion``; more tokens take more warps;
- ``flatten``: 1 for one loop over tiles and depth, so that a tile is loaded while the one before is stored;
- ``described``: 1 for loads by the tensor memory accelerator where the GPU has one; chosen rows cannot be loaded so.
"""


def labels(tokens_BU: Tensor, rows: PackedRows) -> Tensor:
    """See :class:`LossPasses`."""
    label_R = torch.full((rows.capacity,), NO_ROW, dtype=torch.int32, device=rows.device)
    if tokens_BU.stride(-1) != 1:
        tokens_BU = tokens_BU.contiguous()
    if rows.capacity:
        kernels.transducer_labels_kernel[_of_utterances(rows)](
            tokens_BU, label_R, *rows[:3], tokens_BU.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return label_R


def statistics(logits_RV: Tensor, label_R: Tensor) -> Statistics:
    """See :class:`LossPasses`."""
    require_contiguous(logits=logits_RV, label=label_R)
    found = _new_statistics(label_R)
    tile = TILES["statistics"]
    count, classes = logits_RV.shape
    width = triton.next_power_of_2(classes)
    block = max(tile.elements // width, 1)
    if count:
        kernels.transducer_statistics_kernel[(triton.cdiv(count, block),)](
            logits_RV, label_R, *found, count, V=classes, BLOCK_V=width, BLOCK_R=block, num_warps=tile.warps
        )
    return found


def recursion(found: Statistics, rows: PackedRows) -> Recursion:
    """See :class:`LossPasses`."""
    both_2R = found.blank_R.new_empty(2, rows.capacity)
    total_B = found.blank_R.new_empty(rows.utterances)
    tile = TILES["recursion"]
    lanes = max(triton.next_power_of_2(rows.most_tokens + 1), 32)
    kernels.transducer_recursion_kernel[(2, rows.utterances)](
        found.blank_R, found.label_R, *rows[:3], both_2R, total_B, rows.capacity,
        BLOCK_N=lanes, STAGES=tile.stages, num_warps=max(lanes // tile.lanes, 1),
    )  # fmt: skip
    return Recursion(both_2R[0], both_2R[1], total_B)


def transitions(found: Statistics, variables: Recursion, d_loss_B: Tensor, rows: PackedRows) -> Transitions:
    """See :class:`LossPasses`; alpha and beta are one after the other in memory, as ``recursion`` leaves them."""
    by_blank_R, by_label_R = torch.empty_like(found.blank_R), torch.empty_like(found.label_R)
    if rows.capacity:
        kernels.transducer_transitions_kernel[_of_utterances(rows)](
            found.blank_R, found.label_R, variables.alpha_R, variables.total_B, d_loss_B.float(), *rows[:3],
            by_blank_R, by_label_R, rows.capacity, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return Transitions(by_blank_R, by_label_R)


def choose(used: Transitions, label_R: Tensor, d_loss_B: Tensor, dtype: torch.dtype) -> Chosen:
    """See :class:`LossPasses`; rows are left out of which every gradient is zero once it is rounded.

    No gradient of a row is larger than the sum of its arcs. In fp16 ``ROUNDED_TO_ZERO`` and less becomes zero, so that
    nothing is lost. bf16 has smaller numbers: rows are left out that have less than such a part of the largest gradient
    of a loss, all of an utterance's together a thousandth of what rounding to bf16 does.
    """
    through_R = used.blank_R + used.label_R
    floor = ROUNDED_TO_ZERO if dtype == torch.float16 else d_loss_B.detach().abs().amax() * ROUNDED_TO_ZERO
    live_R = (through_R <= floor).logical_not_().logical_and_(label_R != NO_ROW)  # keeps NaN
    rank_R = live_R.cumsum(0, dtype=torch.int32)
    row_R = torch.empty_like(rank_R)
    if len(row_R):
        kernels.transducer_chosen_kernel[(triton.cdiv(len(row_R), BLOCK),)](
            live_R, rank_R, row_R, len(row_R), BLOCK=BLOCK, num_warps=4
        )
    return Chosen(live_R, rank_R, row_R)


def choose_all(used: Transitions, label_R: Tensor, d_loss_B: Tensor, dtype: torch.dtype) -> None:
    """See :class:`LossPasses`; all that exist."""


def gradient(
    logits_RV: Tensor,
    d_logits_RV: Tensor,
    lse_R: Tensor,
    used: Transitions,
    label_R: Tensor,
    first: int,
    rows: PackedRows,
    some: Chosen | None,
    clear: bool,
) -> Tensor:
    """See :class:`LossPasses`."""
    tile = TILES["gradient"]
    size, classes = logits_RV.shape
    width = triton.next_power_of_2(classes)
    block = max(tile.elements // width, 1)
    programs = max(min(tile.programs * multiprocessors(logits_RV.device), triton.cdiv(size, block)), 1)
    partial_PV = logits_RV.new_empty((programs, classes), dtype=torch.float32)
    kernels.transducer_gradient_kernel[(programs,)](
        logits_RV, d_logits_RV, lse_R, *used, label_R, partial_PV, rows.offsets[-1:], *_lists(some), first, size,
        CLEAR=clear, SOME=some is not None,
        V=classes, BLOCK_V=width, BLOCK_R=block, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return column_sums(partial_PV, torch.float32)


def product(
    h_RH: Tensor, weight_VH: Tensor, bias_V: Tensor, label_R: Tensor, first: int, rows: PackedRows
) -> tuple[Tensor, Statistics]:
    """See :class:`LossPasses`."""
    require_contiguous(bias=bias_V, label=label_R)
    (size, width), classes = h_RH.shape, len(weight_VH)
    logits_RV = h_RH.new_empty(size, classes)
    found = _new_statistics(label_R)
    tile = TILES["product"]
    across = triton.cdiv(classes, tile.columns)
    partial_XR = h_RH.new_empty((across, size), dtype=torch.float32)
    if size:
        product_kernels.transducer_product_kernel[(_programs(tile, triton.cdiv(size, tile.rows) * across, h_RH),)](
            _source(tile, h_RH, tile.rows, tile.depth), _source(tile, weight_VH, tile.columns, tile.depth), bias_V,
            logits_RV, partial_XR, rows.offsets[-1:], first, size,
            H=width, V=classes, BLOCK_M=tile.rows, BLOCK_V=tile.columns, BLOCK_H=tile.depth,
            FLATTEN=bool(tile.flatten), DESCRIBED=_described(tile, h_RH), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        kernels.transducer_combine_kernel[(triton.cdiv(size, BLOCK),)](
            logits_RV, partial_XR, label_R, *found, size, V=classes, TILES=across, BLOCK=BLOCK, num_warps=8
        )
    return logits_RV, found


def input_gradient_(
    d_logits_RV: Tensor, weight_VH: Tensor, h_RH: Tensor, first: int, rows: PackedRows, some: Chosen | None
) -> None:
    """See :class:`LossPasses`."""
    (size, width), classes = h_RH.shape, len(weight_VH)
    tile = TILES["input_gradient" if some is None else "some_input_gradient"]
    tiles = triton.cdiv(size, tile.rows) * triton.cdiv(width, tile.columns)
    if size:
        product_kernels.transducer_input_gradient_kernel[(_programs(tile, tiles, h_RH),)](
            d_logits_RV if some is not None else _source(tile, d_logits_RV, tile.rows, tile.depth),
            _source(tile, weight_VH, tile.depth, tile.columns), h_RH, rows.offsets[-1:], *_lists(some), first, size,
            H=width, V=classes, BLOCK_M=tile.rows, BLOCK_H=tile.columns, BLOCK_V=tile.depth, SOME=some is not None,
            FLATTEN=bool(tile.flatten), DESCRIBED=_described(tile, h_RH), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def weight_gradient(d_logits_RV: Tensor, h_RH: Tensor, first: int, rows: PackedRows, some: Chosen | None) -> Tensor:
    """See :class:`LossPasses`; the rows are dealt to as many programs as fill the GPU."""
    (size, width), classes = h_RH.shape, d_logits_RV.shape[1]
    tile = TILES["weight_gradient" if some is None else "some_weight_gradient"]
    tiles = triton.cdiv(classes, tile.rows) * triton.cdiv(width, tile.columns)
    most = triton.cdiv(size, tile.depth)
    shares = max(min(tile.programs * multiprocessors(h_RH.device) // tiles, most), 1)
    partial_XVH = h_RH.new_empty((shares, classes, width), dtype=torch.float32)
    described = _described(tile, h_RH)
    if described:
        _clear_(d_logits_RV, first, rows, tile.depth)
        _clear_(h_RH, first, rows, tile.depth)
    product_kernels.transducer_weight_gradient_kernel[(tiles, shares)](
        _source(tile, d_logits_RV, tile.depth, tile.rows), _source(tile, h_RH, tile.depth, tile.columns), partial_XVH,
        rows.offsets[-1:], *_lists(some), first, size,
        H=width, V=classes, BLOCK_V=tile.rows, BLOCK_H=tile.columns, BLOCK_M=tile.depth,
        DESCRIBED=described, SOME=some is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return partial_XVH.sum(0)


def library_product(
    h_RH: Tensor, weight_VH: Tensor, bias_V: Tensor, label_R: Tensor, first: int, rows: PackedRows
) -> tuple[Tensor, Statistics]:
    """By cuBLASLt, of all rows that there is memory for; statistics in a pass of their own."""
    _clear_(h_RH, first, rows)
    logits_RV = torch.addmm(bias_V, h_RH, weight_VH.t())
    return logits_RV, statistics(logits_RV, label_R)


def library_input_gradient_(
    d_logits_RV: Tensor, weight_VH: Tensor, h_RH: Tensor, first: int, rows: PackedRows, some: Chosen | None
) -> None:
    """By cuBLAS; ``weight_gradient`` has run before and cleared what does not exist."""
    h_RH.copy_(torch.where(h_RH == 0, 0.0, d_logits_RV @ weight_VH))


def library_weight_gradient(
    d_logits_RV: Tensor, h_RH: Tensor, first: int, rows: PackedRows, some: Chosen | None
) -> Tensor:
    """By cuBLAS, which sums in fp32 and rounds once."""
    _clear_(d_logits_RV, first, rows)
    return (d_logits_RV.t() @ h_RH).float()


def _clear_(x_RH: Tensor, first: int, rows: PackedRows, most: int | None = None) -> None:
    """Zero in ``most`` rows behind the last that exists, or in all of them."""
    require_contiguous(x=x_RH)
    size, width = x_RH.shape
    most = size if most is None else min(most, size)
    programs = min(8 * multiprocessors(x_RH.device), triton.cdiv(most * width, CLEARED))
    if programs:
        kernels.transducer_clear_kernel[(programs,)](
            x_RH, rows.offsets[-1:], first, size, most, H=width, BLOCK=CLEARED, num_warps=8
        )


def _described(tile: Tile, x: Tensor) -> bool:
    """Whether tiles come through the tensor memory accelerator, which GPUs have from Hopper on."""
    return bool(tile.described) and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0))


def _source(tile: Tile, x_RC: Tensor, rows: int, columns: int) -> Any:
    """A matrix as a product's kernel takes it, for tiles of ``rows`` x ``columns``."""
    x_RC = x_RC.contiguous()
    return TensorDescriptor.from_tensor(x_RC, [rows, columns]) if _described(tile, x_RC) else x_RC


def _lists(some: Chosen | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if some is None else (some.rank_R, some.row_R)


def _new_statistics(label_R: Tensor) -> Statistics:
    return Statistics(*(torch.empty_like(label_R, dtype=torch.float32) for _ in Statistics._fields))


def _of_utterances(rows: PackedRows) -> tuple[int, int]:
    """A grid over the rows of each utterance."""
    return triton.cdiv(max(rows.most_frames * (rows.most_tokens + 1), 1), BLOCK), rows.utterances


def _programs(tile: Tile, tiles: int, x: Tensor) -> int:
    return min(tiles, tile.programs * multiprocessors(x.device))


FUSED = LossPasses(
    labels, statistics, product, recursion, transitions, choose_all, gradient, weight_gradient, input_gradient_
)
SPARSE = FUSED._replace(choose=choose)
LIBRARY = FUSED._replace(
    product=library_product, weight_gradient=library_weight_gradient, input_gradient_=library_input_gradient_
)
