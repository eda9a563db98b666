"""Cases of self-attention within packs, with gradients in 16 bits or in FP8, and with the gradient of the bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Handover, widen_fp8
from common.ops.sizes import transformer as size


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    tokens: int,
    length: int,
    heads: int,
    head_dim: int,
    sequences: Sequence[tuple[int, int]] | None,
    p: float,
    fp8: bool = False,
    scale: float = 0.0,
    widened: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes. Rows outside all sequences contain NaN.

    Args:
        length: largest possible length of a sequence.
        sequences: start and length of each sequence in tokens; None for packs of ``transformer.LENGTH`` tokens.
        scale: FP8 scale that the previous use left; 0 before the first use.
        widened: convert FP8 gradients of 16-bit activations to the dtype of the activations, because small differences
            may round to other FP8 codes.
    """
    if sequences is None:
        starts, lengths = size.sequences(tokens // size.LENGTH, draw.device)
    else:
        starts, lengths = torch.tensor(sequences, dtype=torch.int32, device=draw.device).t().contiguous()
    row = torch.arange(tokens, device=draw.device)
    member = ((row >= starts[:, None]) & (row < (starts + lengths)[:, None])).any(0)[:, None, None]
    qkv = draw.normal(tokens, 3, heads, head_dim).masked_fill(~member.unsqueeze(1), float("nan")).requires_grad_()
    bias = draw.normal(3 * heads * head_dim).requires_grad_()
    d_context = draw.normal(tokens, heads, head_dim, scale=1e-3 if fp8 else 1.0).masked_fill(~member, float("nan"))
    scaling = draw.scaling(scale) if fp8 else None
    mask, handover = DropoutMask(p, draw.seed(), size.SITE), Handover(scaling)

    def forward() -> Tensor:
        return function(qkv, starts, lengths, length, mask, bias, handover=handover)

    def backward() -> tuple[Any, ...]:
        d_qkv, d_bias = torch.autograd.grad(forward(), [qkv, bias], d_context)
        d_qkv8 = handover.take()
        if d_qkv8 is None or scaling is None:
            return d_qkv, d_bias
        if widened and draw.dtype != torch.float32:
            return widen_fp8(d_qkv8, draw.dtype), d_bias, scaling.scale.to(draw.dtype), scaling.pending
        return d_qkv8, d_bias, scaling

    elements = float(tokens * heads * head_dim)
    product = 2.0 * head_dim * heads * size.pairs(tokens // size.LENGTH)
    unit = draw.dtype.itemsize
    return [
        Pass("forward", forward, 4 * elements * unit, 2 * product),
        Pass("backward", backward, elements * (5 * unit + 3 * (1 if fp8 else unit)), 5 * product, after="forward"),
    ]


SIZES = {
    "tokens": size.PACKS * size.LENGTH,
    "length": size.LENGTH,
    "heads": size.HEADS,
    "head_dim": size.HEAD_DIM,
    "sequences": None,
    "p": size.PROBABILITY,
}
GAPS = {"tokens": 100, "length": 80, "heads": 2, "head_dim": 32, "sequences": ((20, 70), (4, 13), (0, 0))}
"""Sequences in another order than in the buffer, with unused rows before, between and after them."""

MIXED = ((0, 512), (512, 1), (513, 5), (518, 63), (581, 64), (645, 65), (710, 300), (1010, 211), (0, 0), (0, 0))
GPU = {"tokens": 1288, "heads": 4, "sequences": MIXED}

CASES = (
    Case(
        "BERT-large",
        passes,
        SIZES,
        tests=[
            GAPS,
            {"tokens": 65, "length": 65, "heads": 1, "sequences": ((0, 65),)},
            {"tokens": 40, "length": 64, "heads": 1, "head_dim": 128, "sequences": ((0, 33), (34, 5)), "p": 0.0},
            {"tokens": 70, "length": 64, "heads": 1, "sequences": ((0, 0), (0, 0))},
            {"tokens": 30, "length": 32, "heads": 1, "sequences": (*((0, 0),) * 66, (3, 20))},
        ],
        gpu=GPU,
        only=("triton",),
    ),
    Case(
        "BERT-large to FP8",
        passes,
        {**SIZES, "fp8": True},
        tests=[
            {**GAPS, "widened": True},
            {**GAPS, "heads": 1, "scale": 3.7e5, "widened": True},
        ],
        dtypes=(torch.float32, torch.bfloat16),
        only=("triton",),
        tolerance=3.0,
    ),
    Case(
        "BERT-large, masks of the library",
        passes,
        SIZES,
        tests=[{**GPU, "p": 0.0}, {**GAPS, "head_dim": 64, "p": 0.0}],
        dtypes=(torch.float16, torch.bfloat16),
        only=("te",),
        tolerance=2.0,
    ),
)
