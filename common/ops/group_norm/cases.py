"""Cases of the group norms of a latent U-Net, with some sizes of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of, with_gradients
from common.ops.sizes import diffusion

READ_AGAIN = 1024
"""Number of pixels per sample above which both passes read their inputs twice."""


def passes(
    function: Callable[..., Any],
    draw: Draw,
    samples: int,
    side: int | tuple[int, int],
    channels: int,
    groups: int,
    inputs: int = 1,
    first: int = 0,
    added: bool = False,
    silu: bool = True,
    keep: bool = True,
    channels_last: bool = True,
    parameters: torch.dtype | None = None,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        side: height and width in pixels; one number if they are equal.
        channels: channels of all inputs together.
        inputs: 1 or 2; two inputs are concatenated along the channels.
        first: channels of the first of two inputs.
        added: whether a value per sample and channel is added to the input.
        silu: whether SiLU follows.
        keep: whether the inputs are also returned, so that they receive a second gradient.
        channels_last: memory format of inputs and gradients.
        parameters: dtype of weight and bias; None for the dtype of the activations.
    """
    height, width = (side, side) if isinstance(side, int) else side

    def pictures(part: int) -> Tensor:
        x = draw.uniform(samples, height, width, part, low=-1.0, high=3.0).permute(0, 3, 1, 2)
        return x if channels_last else x.contiguous()

    parts = (channels,) if inputs == 1 else (first, channels - first)
    given = tuple(pictures(part) for part in parts)
    weight = draw.uniform(channels, low=0.5, high=1.5, dtype=parameters)
    bias, moved = draw.normal(channels, dtype=parameters), draw.normal(samples, channels) if added else None
    leaves = [each.requires_grad_() for each in (*given, weight, bias, moved) if each is not None]
    epsilon = diffusion.EPSILON if silu else diffusion.TRANSFORMER_EPSILON

    def normalised() -> tuple[Tensor, ...]:
        result = function(given, weight, bias, groups, epsilon, silu=silu, added_NC=moved, keep=keep)
        return (result[0], *result[1]) if keep else (result,)

    def forward() -> tuple[Any, ...]:
        results = normalised()
        return results, results[0].is_contiguous(memory_format=torch.channels_last)

    gradients = [pictures(part) for part in (channels, *(parts if keep else ()))]
    again, unit = height * width > READ_AGAIN, size_of(*given)
    return [
        Pass("forward", forward, (3 if again else 2) * unit),
        Pass(
            "backward",
            with_gradients(leaves, gradients, normalised),
            ((5 if again else 3) + keep) * unit,
            after="forward",
        ),
    ]


def _case(
    side: int, channels: int, name: str = "", tests: Sequence[Mapping[str, Any]] = (), gpu: int = 2, **sizes: Any
) -> Case:
    """Return the case of a norm for one micro-batch; ``sizes`` replace the default ones."""
    return Case(
        f"Stable Diffusion, {channels} at {side}{name}",
        passes,
        {"samples": diffusion.PICTURES, "side": side, "channels": channels, "groups": diffusion.GROUPS, **sizes},
        tests=tests,
        gpu={"samples": gpu},
        dtypes=diffusion.DTYPES,
    )


ADDED: dict[str, Any] = {"added": True, "keep": False}
TRANSFORMER: dict[str, Any] = {"groups": diffusion.TRANSFORMER_GROUPS, "silu": False}
FEW = {"samples": 2, "side": (5, 3)}
"""Sizes for which a program keeps all values that it normalises."""

MORE = {"samples": 1, "side": (27, 19), "channels": 48, "groups": 1}
"""Sizes for which a program reads its values twice, in several tiles."""

CASES = (
    _case(
        64,
        320,
        tests=[
            {**FEW, "channels": 16, "groups": 4},
            {**FEW, "channels": 64, "groups": 16, "keep": False, "parameters": torch.float32},
            {"samples": 2, "side": 1, "channels": 24, "groups": 3},
            {**FEW, "channels": 16, "groups": 4, "channels_last": False},
        ],
    ),
    _case(32, 640),
    _case(16, 1280, gpu=3),
    _case(8, 1280),
    _case(64, 320, " with something added", [{**FEW, "channels": 16, "groups": 4}, MORE], **ADDED),
    _case(16, 1280, " with something added", **ADDED),
    _case(64, 320, " before a transformer", [{**FEW, "channels": 96}], **TRANSFORMER),
    _case(8, 1280, " before a transformer", **TRANSFORMER),
    _case(
        64,
        960,
        " of two",
        [
            {**FEW, "channels": 30, "groups": 2, "first": 20, "keep": False},
            {**FEW, "channels": 24, "groups": 4, "first": 6, "silu": False},
            {**MORE, "first": 12},
        ],
        inputs=2,
        first=640,
    ),
    _case(32, 1920, " of two", inputs=2, first=1280),
    _case(8, 2560, " of two", inputs=2, first=1280),
)
