"""Cases of norm and rotation of queries and keys: FLUX.1's blocks, before and after linear layers in 16 bits or FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.flux1.ops import sizes
from benchmarks.flux1.ops.qk_norm_rope import QkvStream
from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.fp8_cast.reference import Handover
from common.ops.rope import tables


def passes(
    function: Callable[..., tuple[Tensor, Tensor, Tensor]],
    draw: Draw,
    samples: int,
    tokens: tuple[int, ...],
    heads: int,
    head_size: int,
    fp8: bool = False,
    scale: float = 0.0,
    transposed: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        tokens: tokens of a sample in each stream.
        fp8: whether the gradients of the products are in FP8.
        scale: FP8 scale that the previous use left; 0 before the first use.
        transposed: whether the gradients of the results are (N, H, L, D) in memory, as attention libraries may return.
    """
    columns, length = 3 * heads * head_size, sum(tokens)
    streams = [
        QkvStream(
            draw.normal(samples * own, columns).requires_grad_(),
            draw.normal(columns).requires_grad_(),
            draw.normal(head_size).requires_grad_(),
            draw.normal(head_size).requires_grad_(),
            own,
            Handover(draw.scaling(scale) if fp8 else None),
        )
        for own in tokens
    ]
    angles = tables(torch.arange(length, device=draw.device), head_size, sizes.FACTS.rope_theta)
    cos, sin = (draw.rounded(table, torch.float32) for table in angles)
    order = (samples, heads, length, head_size) if transposed else (samples, length, heads, head_size)
    gradients = [draw.normal(*order) for _ in range(3)]
    if transposed:
        gradients = [each.transpose(1, 2) for each in gradients]

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return function(streams, cos, sin, sizes.FACTS.norm_epsilon)

    def backward() -> list[Any]:
        found = torch.autograd.grad(forward(), [leaf for stream in streams for leaf in stream[:4]], gradients)
        handovers = [stream.handover for stream in streams if stream.handover is not None]
        products = [each.take() for each in handovers] if fp8 else found[::4]
        return [products, found[1::4], found[2::4], found[3::4], [each.scaling for each in handovers]]

    unit = size_of(*(stream.qkv for stream in streams))
    written = sum(stream.qkv.numel() for stream in streams) if fp8 else unit
    return [
        Pass("forward", forward, 2 * unit),
        Pass("backward", backward, (1 + 2 / 3) * unit + written, after="forward"),
    ]


SIZES = {"samples": sizes.SAMPLES, "heads": sizes.FACTS.heads, "head_size": sizes.FACTS.head_size}
DOUBLE = {**SIZES, "tokens": (sizes.FACTS.text_length, sizes.FACTS.image_length)}

CASES = (
    Case(
        "FLUX.1, double block",
        passes,
        DOUBLE,
        tests=[
            {"samples": 3, "tokens": (5, 9), "heads": 2, "head_size": 16},
            {"samples": 1, "tokens": (3, 1, 40), "heads": 1, "head_size": 2},
        ],
        gpu={"samples": 3, "tokens": (77, 130)},
        dtypes=sizes.DTYPES,
    ),
    Case(
        "FLUX.1, single block",
        passes,
        {**SIZES, "tokens": (sizes.FACTS.length,)},
        tests=[{"samples": 2, "tokens": (45,), "heads": 3, "head_size": 32, "transposed": True}],
        gpu={"samples": 3, "tokens": (301,), "transposed": True},
        dtypes=sizes.DTYPES,
    ),
    Case(
        "FLUX.1, double block to FP8",
        passes,
        {**DOUBLE, "fp8": True},
        tests=[
            {"samples": 3, "tokens": (5, 30), "heads": 2, "head_size": 16},
            {"samples": 2, "tokens": (8, 24), "heads": 1, "head_size": 64, "scale": 370.0},
        ],
        gpu={"samples": 3, "tokens": (80, 128)},
        dtypes=(torch.bfloat16,),
    ),
)
