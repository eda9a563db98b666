"""Cases of attention: packed self-attention and cross-attention of a latent U-Net, and joint attention of FLUX.1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.dense_attention import Attention
from common.ops.sizes import diffusion


def passes(
    function: Attention,
    draw: Draw,
    pictures: int,
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    packed: bool = False,
    views: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes, with all three gradients.

    Args:
        packed: whether queries, keys and values are one tensor, with as many keys as queries.
        views: whether keys and values are parts of wider rows, and the gradient of the result is not contiguous.
    """
    q = draw.normal(pictures, queries, heads, head_size)
    do = draw.normal(pictures, queries, heads, head_size)
    if packed:
        qkv = draw.normal(pictures, queries, 3, heads, head_size)
        leaves, read = [qkv], size_of(qkv)
    elif views:
        wide = draw.normal(pictures, keys, 6, heads, head_size)
        k, v = wide[:, :, 2:4].unbind(2)
        leaves, read = [q, wide], size_of(q, k, v)
        do = do.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        k, v = (draw.normal(pictures, keys, heads, head_size) for _ in range(2))
        leaves, read = [q, k, v], size_of(q, k, v)
    for leaf in leaves:
        leaf.requires_grad_()

    def attend() -> Tensor:
        if packed:
            return function.packed(qkv)
        return function(q, *(wide[:, :, 2:4].unbind(2) if views else (k, v)))

    def forward() -> tuple[Tensor, bool]:
        o = attend()
        return o, o.is_contiguous()

    def backward() -> tuple[Any, ...]:
        gradients = torch.autograd.grad(attend(), leaves, do)
        return *gradients, not packed or gradients[0].is_contiguous()

    product = 2.0 * pictures * heads * head_size * queries * keys
    moved = read + size_of(do)
    return [
        Pass("forward", forward, moved, 2 * product),
        Pass("backward", backward, 2 * moved, 5 * product, after="forward"),
    ]


SMALL = {"pictures": 3, "heads": 2, "queries": 130}

CASES = (
    *(
        Case(
            f"Stable Diffusion, {level.side**2} tokens",
            passes,
            {
                "pictures": diffusion.PICTURES,
                "queries": level.side**2,
                "keys": level.side**2,
                "heads": level.heads,
                "head_size": diffusion.HEAD_SIZE,
                "packed": True,
            },
            tests=[{**SMALL, "keys": 130, "head_size": size} for size in ((8, 40, 128) if level.side == 8 else ())],
            gpu={"pictures": 2 if level.side < 64 else 1},
            dtypes=diffusion.HALF,
            tolerance=2.0,
        )
        for level in diffusion.LEVELS
    ),
    *(
        Case(
            f"Stable Diffusion, {level.side**2} tokens to a caption",
            passes,
            {
                "pictures": diffusion.PICTURES,
                "queries": level.side**2,
                "keys": diffusion.CAPTION,
                "heads": level.heads,
                "head_size": diffusion.HEAD_SIZE,
            },
            tests=[{**SMALL, "keys": 5, "head_size": size} for size in ((8, 40, 128) if level.side == 8 else ())],
            gpu={"pictures": 2, "views": level.side == 16},
            dtypes=diffusion.HALF,
            tolerance=2.0,
        )
        for level in diffusion.LEVELS
    ),
    Case(
        "FLUX.1",
        passes,
        {
            "pictures": diffusion.FLUX.samples,
            "queries": diffusion.FLUX.tokens,
            "keys": diffusion.FLUX.tokens,
            "heads": diffusion.FLUX.heads,
            "head_size": diffusion.FLUX.head_size,
        },
        gpu={"pictures": 2},
        dtypes=diffusion.HALF,
        tolerance=2.0,
    ),
)
