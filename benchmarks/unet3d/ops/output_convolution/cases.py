"""Cases of the last convolution. The gradient of its logits is contiguous, as the loss writes it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.unet3d.ops.sizes import FACTS, SAMPLES
from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.local_convolution.cases import volumes


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    channels: int,
    classes: int,
    volume: tuple[int, int, int],
    channels_last: bool = False,
    one_number: bool = False,
    step: int = 1,
) -> list[Pass]:
    """Return the forward pass, and the backward pass with the gradients of all three inputs.

    Args:
        volume: (D, H, W).
        channels_last: memory format of the gradient of the logits.
        one_number: whether the gradient of the logits is one expanded element, like the gradient of a sum.
        step: input and gradient of the logits are every ``step``-th plane of deeper tensors.
    """
    depth, *plane = volume
    x = volumes(draw, samples, channels, (step * depth, *plane))[:, :, ::step]
    weight = draw.normal(classes, channels, 1, 1, 1, scale=channels**-0.5)
    bias = draw.normal(classes)
    dy = volumes(draw, samples, classes, (step * depth, *plane), channels_last=channels_last)[:, :, ::step]
    if one_number:
        dy = dy[:1, :1, :1, :1, :1].expand_as(dy)
    flops = 2.0 * dy.numel() * channels
    return both_ways(
        lambda: function(x, weight, bias),
        [x, weight, bias],
        [dy],
        moved=(size_of(x, dy), 2 * size_of(x) + size_of(dy)),
        flops=(flops, 2 * flops),
    )


CASES = (
    Case(
        "3D U-Net",
        passes,
        {"samples": SAMPLES, "channels": FACTS.filters[0], "classes": FACTS.classes, "volume": FACTS.input_shape},
        tests=[
            {"samples": 1, "channels": 33, "volume": (7, 11, 9)},  # several programs, some of several blocks
            {"samples": 2, "volume": (4, 8, 16), "channels_last": True},  # full blocks
            {"samples": 2, "channels": 64, "classes": 16, "volume": (4, 5, 6)},
            {"samples": 3, "channels": 5, "classes": 5, "volume": (3, 5, 7), "channels_last": True},
            {"samples": 2, "channels": 7, "classes": 1, "volume": (3, 5, 1)},
            {"samples": 2, "channels": 5, "volume": (3, 4, 2), "one_number": True},
            {"samples": 2, "channels": 5, "volume": (3, 4, 2), "step": 2},
        ],
        gpu={"samples": 2},
    ),
)
