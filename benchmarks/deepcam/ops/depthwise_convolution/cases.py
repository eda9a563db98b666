"""Cases of the depthwise convolution: layers of the encoder of DeepCAM."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    channels: int,
    size: tuple[int, int],
    stride: int = 1,
    dilation: int = 1,
) -> list[Pass]:
    """Make both passes.

    Args:
        size: (H, W) of the input.
    """
    x = draw.normal(samples, *size, channels).movedim(-1, 1)
    weight = draw.normal(channels, 1, 3, 3)
    dy = draw.normal(samples, *((edge - 1) // stride + 1 for edge in size), channels).movedim(-1, 1)
    moved = size_of(x, dy), 2 * size_of(x) + size_of(dy)
    return both_ways(lambda: function(x, weight, stride, dilation), [x, weight], [dy], moved=moved)


TESTS = [
    {"samples": 2, "channels": 64, "size": (8, 16)},  # whole tiles
    {"samples": 3, "channels": 5, "size": (3, 2)},  # the only tile is not full
    {"samples": 1, "channels": 72, "size": (9, 13), "stride": 2},  # odd edges, two blocks of channels
    {"samples": 2, "channels": 24, "size": (10, 6), "dilation": 2},
]

CASES = tuple(
    Case(name, passes, {"samples": 8, **sizes}, tests=TESTS if name == "middle blocks" else (), gpu={"samples": 1})
    for name, sizes in {
        "middle blocks": {"channels": 728, "size": (48, 72)},
        "first entry block": {"channels": 128, "size": (384, 576)},
        "first entry block, stride 2": {"channels": 128, "size": (384, 576), "stride": 2},
        "exit, dilation 2": {"channels": 1536, "size": (48, 72), "dilation": 2},
    }.items()
)
