"""Weight gradients through the Triton kernel of :mod:`common.ops.weight_gradient.kernels`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from common.ops.implementation import OperationRequest
from common.ops.triton_support import multiprocessors, no_triton, require_contiguous
from common.ops.weight_gradient import kernels
from common.ops.weight_gradient.plain import Room

FIRST_CAPABILITY = (9, 0)
"""Of the tensor memory accelerator."""


class Tile(NamedTuple):
    """How the product is cut.

    Attributes:
        outputs, inputs: of a tile of the gradient.
        tokens: that are in shared memory at a time.
        group: rows of tiles that are taken together.
        warps, stages: of a program; stages of tokens are on their way at a time.
        reduce: the memory adds, not the program.
        flatten: tiles and tokens are one loop, so that a tile's first tokens come beneath the end of the one before.
    """

    outputs: int
    inputs: int
    tokens: int
    group: int
    warps: int
    stages: int
    reduce: bool
    flatten: bool


TILES: dict[str, Tile] = {"weight gradient": Tile(128, 256, 128, 8, 8, 3, True, False)}
"""``--sweep`` of :mod:`common.ops.weight_gradient.bench_cases` times others."""


def unsupported(request: OperationRequest) -> str | None:
    """Why the kernel can't serve ``request``; None if it may."""
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"gradients are bf16, fp16 or fp32, not {request.dtype}"
    if request.device.type == "cuda" and torch.cuda.get_device_capability(request.device) < FIRST_CAPABILITY:
        return "the kernel moves tiles by the tensor memory accelerator, which GPUs have from compute capability 9.0 on"
    return no_triton(request.device)


def accumulate(
    dy_OT: Tensor, x_IT: Tensor, dy_inverse: Tensor, x_inverse: Tensor, gradient_OI: Tensor, room: Room
) -> None:
    """See :func:`common.ops.weight_gradient.plain.accumulate_torch`. One launch, and no room."""
    require_contiguous(dy=dy_OT, x=x_IT, gradient=gradient_OI)
    tile, (outputs, tokens), inputs = TILES["weight gradient"], dy_OT.shape, len(x_IT)
    tiles = triton.cdiv(outputs, tile.outputs) * triton.cdiv(inputs, tile.inputs)
    kernels.weight_gradient_kernel[(min(tiles, multiprocessors(dy_OT.device)),)](
        TensorDescriptor.from_tensor(dy_OT, [tile.outputs, tile.tokens]),
        TensorDescriptor.from_tensor(x_IT, [tile.inputs, tile.tokens]),
        TensorDescriptor.from_tensor(gradient_OI, [tile.outputs, tile.inputs // 2]),
        dy_inverse, x_inverse, outputs, inputs, tokens,
        BLOCK_O=tile.outputs, BLOCK_I=tile.inputs, BLOCK_T=tile.tokens, GROUP=tile.group,
        REDUCE=tile.reduce, FLATTEN=tile.flatten, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
