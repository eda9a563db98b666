"""Class entropies through the Triton kernels of :mod:`benchmarks.ssd300.ops.class_entropy.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.ssd300.ops.class_entropy import kernels
from benchmarks.ssd300.ops.head_results import HeadChannels, boxes_of, empty_gradient, joined_offsets
from common.ops.tile import Tile

TILES: dict[str, Tile] = {"forward": Tile(rows=16, warps=4), "backward": Tile(rows=16, warps=4)}
"""Pass to its tile."""


class _ClassEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, channels: Sequence[HeadChannels], class_NA: Tensor, *results: Tensor
    ) -> tuple[Tensor, Tensor]:
        results = tuple(y_NCHW.contiguous(memory_format=torch.channels_last) for y_NCHW in results)
        boxes = boxes_of(channels, results)
        entropy_NA = torch.empty(class_NA.shape, dtype=torch.float32, device=class_NA.device)
        lse_NA = torch.empty_like(entropy_NA)
        start = 0
        for head, y_NCHW, count in zip(channels, results, boxes, strict=True):
            grid, sizes, launch = _launch("forward", head, y_NCHW, count, start, class_NA.shape[1])
            kernels.class_entropy_forward_kernel[grid](y_NCHW, class_NA, entropy_NA, lse_NA, *sizes, **launch)
            start += count
        ctx.channels, ctx.boxes = channels, boxes
        ctx.save_for_backward(class_NA, lse_NA, *results)
        return entropy_NA, joined_offsets(channels, results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        class_NA, lse_NA, *results = ctx.saved_tensors
        d_entropy_NA, d_offsets_NA4 = (gradient.contiguous() for gradient in gradients)
        d_results, start = [], 0
        for head, y_NCHW, d_offsets in zip(ctx.channels, results, d_offsets_NA4.split(ctx.boxes, 1), strict=True):
            d_y_NCHW = empty_gradient(head, y_NCHW, d_offsets)
            count = d_offsets.shape[1]
            grid, sizes, launch = _launch("backward", head, y_NCHW, count, start, class_NA.shape[1])
            kernels.class_entropy_backward_kernel[grid](
                d_entropy_NA, y_NCHW, class_NA, lse_NA, d_y_NCHW, *sizes, **launch
            )
            d_results.append(d_y_NCHW)
            start += count
        return None, None, *d_results


def _launch(
    name: str, head: HeadChannels, y_NCHW: Tensor, boxes: int, start: int, all_boxes: int
) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Grid, sizes and constants of a kernel over one level."""
    tile, rows = TILES[name], len(y_NCHW) * boxes
    sizes = (rows, boxes, start, head.kinds, head.classes, y_NCHW.shape[1], all_boxes)
    block = triton.next_power_of_2(head.classes)
    return (triton.cdiv(rows, tile.rows),), sizes, {"ROWS": tile.rows, "BLOCK": block, "num_warps": tile.warps}


def class_entropy(
    channels: Sequence[HeadChannels], results: Sequence[Tensor], class_NA: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`benchmarks.ssd300.ops.class_entropy.reference.class_entropy_reference`."""
    found: tuple[Tensor, Tensor] = _ClassEntropy.apply(channels, class_NA.contiguous(), *results)
    return found
