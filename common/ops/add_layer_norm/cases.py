"""Cases of layer norms: in the transformers of a latent U-Net, after the addition of residual and bias, and in the
Evoformer, with nothing added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.sizes import diffusion, folding


def passes(
    function: Callable[..., tuple[Tensor, Tensor]],
    draw: Draw,
    rows: int,
    features: int,
    residual: bool = True,
    added: bool = True,
    read: tuple[int, ...] = (0, 1),
    parameters: torch.dtype | None = None,
    transposed: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        residual: whether a matrix, whose mean is far from zero, is added to the input.
        added: whether a vector is added to each row.
        read: indices of the results that have gradients: 0 is the sum, 1 is the normalised sum.
        parameters: dtype of weight and bias; None for that of the activations.
        transposed: whether the input and the gradient of the sum are transposes of contiguous matrices.
    """
    x, d_sum = (draw.normal(features, rows).t() if transposed else draw.normal(rows, features) for _ in range(2))
    d_normed = draw.normal(rows, features)
    other = draw.uniform(rows, features, low=0.0, high=4.0) if residual else None
    vector = draw.normal(features) if added else None
    weight, bias = (draw.normal(features, dtype=parameters) for _ in range(2))
    leaves = [each.requires_grad_() for each in (x, other, vector, weight, bias) if each is not None]

    def forward() -> tuple[Tensor, Tensor]:
        return function(x, other, weight, bias, 1e-5, added_C=vector)

    def results() -> tuple[Tensor, Tensor, bool]:
        total, normed = forward()
        return total, normed, normed.is_contiguous()

    def backward() -> tuple[Tensor | None, ...]:
        results, gradients = forward(), (d_sum, d_normed)
        return torch.autograd.grad(
            [results[index] for index in read], leaves, [gradients[index] for index in read], allow_unused=True
        )

    unit = size_of(x)
    changed = residual or added
    return [
        Pass("forward", results, (2 + residual + changed) * unit),
        Pass("backward", backward, (2 + len(read)) * unit, after="forward"),
    ]


TESTS: tuple[Sequence[dict[str, Any]], ...] = (
    [{"rows": 37}, {"rows": 13, "residual": False}, {"rows": 13, "features": 80, "added": False}],
    [
        {"rows": 6, "features": 7, "residual": False, "added": False},
        {"rows": 6, "features": 1, "read": (0,)},
        {"rows": 5, "features": 48, "read": (0,), "residual": False, "added": False},
        {"rows": 5, "features": 48, "read": (1,)},
        {"rows": 5, "features": 48, "read": (1,), "residual": False, "added": False},
    ],
    [{"rows": 600, "features": 32, "parameters": torch.float32}],
    (),
)
"""Sizes of the tests for each level."""

TRANSPOSED: list[dict[str, Any]] = [
    {"rows": 70, "features": 48},
    {"rows": 37, "features": 7, "read": (0, 1)},
    {"rows": 3, "features": 40, "added": True},
    {"rows": 1, "features": 5},
]
NOTHING_ADDED = {"residual": False, "added": False, "read": (1,)}
CASES = (
    *(
        Case(
            f"Stable Diffusion, {level.channels} at {level.side}",
            passes,
            {"rows": diffusion.PICTURES * level.side**2, "features": level.channels},
            tests=tests,
            gpu={"rows": 2 * level.side**2 + 1},
            dtypes=diffusion.DTYPES,
        )
        for level, tests in zip(diffusion.LEVELS, TESTS, strict=True)
    ),
    *(
        Case(
            f"OpenFold, {name}",
            passes,
            {"rows": rows, "features": features, "transposed": name == "triangles", **NOTHING_ADDED},
            tests=tests,
            gpu={"rows": 10_001},
            dtypes=folding.DTYPES,
        )
        for name, rows, features, tests in (
            ("alignment", folding.CLUSTERS * folding.RESIDUES, folding.MSA, []),
            ("pairs", folding.RESIDUES**2, folding.PAIR, []),
            ("triangles", folding.RESIDUES**2, folding.PAIR, TRANSPOSED),
        )
    ),
)
