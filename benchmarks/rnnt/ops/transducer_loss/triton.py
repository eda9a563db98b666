"""Transducer loss with the Triton kernels of this package, which include the products.

There are no atomics. Unused rows are neither read nor written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.rnnt.ops.transducer_loss import kernels, product_kernels
from benchmarks.rnnt.ops.transducer_loss.passes import NO_ROW, Chosen, Recursion, Statistics, Transitions
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import multiprocessors, require_contiguous

BLOCK = 1024
"""Rows per program in kernels that do not read whole rows of logits."""
ROUNDED_TO_ZERO = 2.0**-25
"""Largest number that fp16 rounds to zero."""


TILES: dict[str, Tile] = {
    "gradient": Tile(elements=4096, warps=8, programs=4, stages=2),
    "recursion": Tile(columns=128, stages=8),
    "product": Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1),
    "input_gradient": Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1),
    "weight_gradient": Tile(rows=128, columns=256, depth=64, warps=8, stages=5, programs=1),
}
"""Tile of each pass. ``columns`` of ``recursion``: maximum token positions per warp; more need more warps."""


def labels(tokens_BU: Tensor, rows: PackedRows) -> Tensor:
    """Return the label of every row, (R,) int32; see :class:`LossPasses`."""
    label_R = torch.full((rows.capacity,), NO_ROW, dtype=torch.int32, device=rows.device)
    if tokens_BU.stride(-1) != 1:
        tokens_BU = tokens_BU.contiguous()
    if rows.capacity:
        kernels.transducer_labels_kernel[_of_utterances(rows)](
            tokens_BU, label_R, *rows[:3], tokens_BU.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return label_R


def recursion(found: Statistics, rows: PackedRows) -> Recursion:
    """Return logarithms of the summed probabilities of paths: alpha, beta (R,) and total (B,).

    See :class:`LossPasses`.
    """
    both_2R = found.blank_R.new_empty(2, rows.capacity)
    total_B = found.blank_R.new_empty(rows.utterances)
    tile = TILES["recursion"]
    columns = max(triton.next_power_of_2(rows.most_tokens + 1), 32)
    kernels.transducer_recursion_kernel[(2, rows.utterances)](
        found.blank_R, found.label_R, *rows[:3], both_2R, total_B, rows.capacity,
        BLOCK_N=columns, STAGES=tile.stages, num_warps=max(columns // tile.columns, 1),
    )  # fmt: skip
    return Recursion(both_2R[0], both_2R[1], total_B)


def transitions(found: Statistics, variables: Recursion, d_loss_B: Tensor, rows: PackedRows) -> Transitions:
    """Return the negative gradients (R,) by the logarithms of blank's and the label's probability.

    See :class:`LossPasses`. Alpha and beta must be contiguous in memory, like the results of ``recursion``.
    """
    by_blank_R, by_label_R = torch.empty_like(found.blank_R), torch.empty_like(found.label_R)
    if rows.capacity:
        kernels.transducer_transitions_kernel[_of_utterances(rows)](
            found.blank_R, found.label_R, variables.alpha_R, variables.total_B, d_loss_B.float(), *rows[:3],
            by_blank_R, by_label_R, rows.capacity, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return Transitions(by_blank_R, by_label_R)


def choose(used: Transitions, label_R: Tensor, d_loss_B: Tensor, dtype: torch.dtype) -> Chosen:
    """Return the rows that contribute to gradients in ``dtype``.

    See :class:`LossPasses`. Rows are left out if all their gradients round to zero. No gradient of a row exceeds the
    sum of its arcs. In fp16, ``ROUNDED_TO_ZERO`` and less become zero, so nothing is lost. bf16 has smaller numbers, so
    rows are left out if their sum is at most ``ROUNDED_TO_ZERO`` times the largest gradient of a loss. All left-out
    rows of an utterance together are about a thousandth of bf16's rounding error.
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


def gradient(
    logits_RV: Tensor,
    d_logits_RV: Tensor,
    lse_R: Tensor,
    used: Transitions,
    label_R: Tensor,
    first: int,
    chosen: Chosen,
) -> Tensor:
    """Write the gradient of the chosen rows' logits to ``d_logits_RV``; return its sums over them, (V,) fp32.

    See :class:`LossPasses`. All other rows of ``d_logits_RV`` stay unchanged.
    """
    tile = TILES["gradient"]
    size, classes = logits_RV.shape
    width = triton.next_power_of_2(classes)
    block = max(tile.elements // width, 1)
    programs = max(min(tile.programs * multiprocessors(logits_RV.device), triton.cdiv(size, block)), 1)
    partial_PV = logits_RV.new_empty((programs, classes), dtype=torch.float32)
    kernels.transducer_gradient_kernel[(programs,)](
        logits_RV, d_logits_RV, lse_R, *used, label_R, partial_PV, chosen.rank_R, chosen.row_R, first, size,
        V=classes, BLOCK_V=width, BLOCK_R=block, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return column_sums(partial_PV, torch.float32)


def product(
    h_RH: Tensor, weight_VH: Tensor, bias_V: Tensor, label_R: Tensor, first: int, rows: PackedRows
) -> tuple[Tensor, Statistics]:
    """Return logits (R, V) and their statistics; see :class:`LossPasses`."""
    require_contiguous(bias=bias_V, label=label_R)
    (size, width), classes = h_RH.shape, len(weight_VH)
    logits_RV = h_RH.new_empty(size, classes)
    found = Statistics(*(torch.empty_like(label_R, dtype=torch.float32) for _ in Statistics._fields))
    tile = TILES["product"]
    across = triton.cdiv(classes, tile.columns)
    partial_XR = h_RH.new_empty((across, size), dtype=torch.float32)
    if size:
        product_kernels.transducer_product_kernel[(_programs(tile, triton.cdiv(size, tile.rows) * across, h_RH),)](
            _source(h_RH, tile.rows, tile.depth), _source(weight_VH, tile.columns, tile.depth), bias_V,
            logits_RV, partial_XR, rows.offsets[-1:], first, size,
            H=width, V=classes, BLOCK_M=tile.rows, BLOCK_V=tile.columns, BLOCK_H=tile.depth,
            DESCRIBED=_described(h_RH), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        kernels.transducer_combine_kernel[(triton.cdiv(size, BLOCK),)](
            logits_RV, partial_XR, label_R, *found, size, V=classes, TILES=across, BLOCK=BLOCK, num_warps=8
        )
    return logits_RV, found


def input_gradient_(d_logits_RV: Tensor, weight_VH: Tensor, h_RH: Tensor, first: int, chosen: Chosen) -> None:
    """Replace ``h_RH`` by its gradient in chosen rows; see :class:`LossPasses`."""
    (size, width), classes = h_RH.shape, len(weight_VH)
    tile = TILES["input_gradient"]
    tiles = triton.cdiv(size, tile.rows) * triton.cdiv(width, tile.columns)
    if size:
        product_kernels.transducer_input_gradient_kernel[(_programs(tile, tiles, h_RH),)](
            d_logits_RV, _source(weight_VH, tile.depth, tile.columns), h_RH, chosen.rank_R, chosen.row_R, first, size,
            H=width, V=classes, BLOCK_M=tile.rows, BLOCK_H=tile.columns, BLOCK_V=tile.depth,
            DESCRIBED=_described(h_RH), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def weight_gradient(d_logits_RV: Tensor, h_RH: Tensor, first: int, chosen: Chosen) -> Tensor:
    """Return the gradient (V, H) fp32 of the weight, from the chosen rows.

    See :class:`LossPasses`. The rows are divided among as many programs as fill the GPU.
    """
    (size, width), classes = h_RH.shape, d_logits_RV.shape[1]
    tile = TILES["weight_gradient"]
    tiles = triton.cdiv(classes, tile.rows) * triton.cdiv(width, tile.columns)
    most = triton.cdiv(size, tile.depth)
    shares = max(min(tile.programs * multiprocessors(h_RH.device) // tiles, most), 1)
    partial_XVH = h_RH.new_empty((shares, classes, width), dtype=torch.float32)
    product_kernels.transducer_weight_gradient_kernel[(tiles, shares)](
        d_logits_RV.contiguous(), h_RH.contiguous(), partial_XVH, chosen.rank_R, chosen.row_R, first, size,
        H=width, V=classes, BLOCK_V=tile.rows, BLOCK_H=tile.columns, BLOCK_M=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return partial_XVH.sum(0)


def _described(x: Tensor) -> bool:
    """Return whether to load tiles by the tensor memory accelerator, which GPUs have since Hopper."""
    return x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0)


def _source(x_RC: Tensor, rows: int, columns: int) -> Any:
    """Return a matrix as kernel argument, for tiles of ``rows`` x ``columns``."""
    x_RC = x_RC.contiguous()
    return TensorDescriptor.from_tensor(x_RC, [rows, columns]) if _described(x_RC) else x_RC


def _of_utterances(rows: PackedRows) -> tuple[int, int]:
    """Return a grid over the rows of each utterance."""
    return triton.cdiv(max(rows.most_frames * (rows.most_tokens + 1), 1), BLOCK), rows.utterances


def _programs(tile: Tile, tiles: int, x: Tensor) -> int:
    return min(tiles, tile.programs * multiprocessors(x.device))
