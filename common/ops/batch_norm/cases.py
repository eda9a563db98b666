"""Cases of the batch norms of ResNet-50 with 400 pictures, alone and fused with the operations that follow.

Inputs count twice in the bytes of a pass: the forward pass needs the statistics before it can normalise the first
element, and the backward pass needs sums of the gradient before it can write the first element of the input's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.batch_norm.reference import BatchNormState
from common.ops.cases import Case, Draw, Pass, size_of, with_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def activations(draw: Draw, shape: Sequence[int], channels_last: bool) -> Tensor:
    """Return activations with few different values, so that rounding never decides whether a result passes ReLU."""
    x = draw.rounded(draw.integers(-2, 3, *shape) + 3)
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def gradient(draw: Draw, shape: Sequence[int], channels_last: bool) -> Tensor:
    """Return a gradient. The sum of two such gradients is exact in every dtype."""
    dy = draw.rounded(draw.integers(-16, 17, *shape) / 8)
    return dy.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def norm(draw: Draw, channels: int) -> BatchNormState:
    """Return parameters and running statistics, which are fp32 whatever the dtype of the activations."""
    weight, bias, mean = (draw.normal(channels, dtype=torch.float32) for _ in range(3))
    return BatchNormState(weight, bias, mean, draw.uniform(channels, low=0.5, high=2.0, dtype=torch.float32))


def moments_of(x: Tensor) -> Tensor:
    """Return the sums of x and of its square over N, H and W, fp32 (2, 1, C), as a convolution computes them."""
    wide = x.detach().double()
    return torch.stack([wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3))]).unsqueeze(1).float()


def both_directions(
    forward: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    norms: Sequence[BatchNormState],
    gradients: Sequence[Tensor],
    readers: Sequence[int],
    moved: tuple[float, float],
) -> list[Pass]:
    """Make both passes from a function: the forward pass returns its results, the backward pass returns gradients.

    Both also return the running statistics.

    Args:
        forward: function that enqueues the forward pass.
        inputs: tensors that get a gradient, in addition to the parameters.
        norms: parameters and running statistics.
        readers: indices of the results whose gradients the backward pass starts from.
        moved: bytes moved by the forward pass and by the backward pass.
    """
    leaves = [*inputs, *(parameter for own in norms for parameter in (own.weight, own.bias))]
    for leaf in leaves:
        leaf.requires_grad_()
    running = [(own.running_mean, own.running_var) for own in norms]

    def read() -> tuple[Tensor, ...]:
        results = forward()
        return tuple(results[reader] for reader in readers)

    backward = with_gradients(leaves, [gradients[reader] for reader in readers], read)
    return [
        Pass("forward", lambda: (forward(), running), moved[0]),
        Pass("backward", lambda: (backward(), running), moved[1], after="forward"),
    ]


def alone(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    relu: bool = True,
    moments: bool = False,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the passes of a batch norm with ReLU. ``moments`` gives it the sums that a convolution computes.

    Forward reads x twice and writes y. Backward reads the gradient and x twice and writes the gradient of x.
    """
    shape = pictures, channels, height, width
    x, own = activations(draw, shape, channels_last), norm(draw, channels)
    options: dict[str, Any] = {"relu": relu, **({"moments": moments_of(x)} if moments else {})}
    dy = gradient(draw, shape, channels_last)
    unit = size_of(x)
    return both_directions(lambda: (function(x, own, **options),), [x], [own], [dy], (0,), (3 * unit, 5 * unit))


def add_relu(
    function: Callable[..., tuple[Tensor, Tensor]],
    draw: Draw,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    projected: bool,
    moments: bool = False,
    channels_last: bool = True,
    readers: tuple[int, ...] = (0, 1),
) -> list[Pass]:
    """Make the passes of a batch norm with residual and ReLU; ``projected`` normalises the residual, too.

    The bytes include one bit per element for the mask of the ReLU.
    """
    shape = pictures, channels, height, width
    x, residual = (activations(draw, shape, channels_last) for _ in range(2))
    norms = [norm(draw, channels) for _ in range(1 + projected)]
    given = {"moments": moments_of(x), "residual_moments": moments_of(residual)} if moments else {}
    gradients = [gradient(draw, shape, channels_last) for _ in range(2)]

    def forward() -> tuple[Tensor, Tensor]:
        return function(x, norms[0], residual, norms[1] if projected else None, **given)

    unit, bits = size_of(x), x.numel() / 8
    moved = ((5 if projected else 4) * unit + bits, (10 if projected else 7) * unit + bits)
    return both_directions(forward, [x, residual], norms, gradients, readers, moved)


def relu_max_pool(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the passes of a batch norm with ReLU and max pooling.

    For each maximum, forward writes its value, the input that it came from, and one byte for the offset of that input.
    """
    x, own = activations(draw, (pictures, channels, height, width), channels_last), norm(draw, channels)
    dy = gradient(draw, (pictures, channels, (height + 1) // 2, (width + 1) // 2), channels_last)
    moved = 2 * size_of(x) + 2 * size_of(dy) + dy.numel(), 2 * size_of(x) + 3 * size_of(dy) + dy.numel()
    return both_directions(lambda: (function(x, own),), [x], [own], [dy], (0,), moved)


def evaluate(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    relu: bool = True,
    added: bool = True,
    projected: bool = False,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the pass of evaluation mode, which uses the running statistics."""
    shape = pictures, channels, height, width
    x, residual = (activations(draw, shape, channels_last) for _ in range(2))
    own, other = norm(draw, channels), norm(draw, channels)
    options: dict[str, Any] = {
        "residual_NCHW": residual if added else None,
        "residual_norm": other if projected else None,
    }
    run = torch.no_grad()(lambda: function(x, own, relu=relu, **options))
    return [Pass("forward", run, (2 + added) * size_of(x))]


def map_of(channels: int, size: int) -> dict[str, int]:
    """Return the sizes of a feature map of ResNet-50, whose height and width are ``size``."""
    return {"pictures": 400, "channels": channels, "height": size, "width": size}


NARROW = {"pictures": 3, "channels": 24, "height": 9, "width": 11}
"""Sizes for several programs, whose last tiles are not full."""
WIDE = {"pictures": 2, "channels": 72, "height": 9, "width": 8}
"""Sizes for two blocks of columns, the second not full, and for programs with two tiles."""
EVEN = {"pictures": 2, "channels": 16, "height": 16, "width": 16}
SINGLE = {"pictures": 5, "channels": 8, "height": 1, "width": 1}
LARGE = {"pictures": 9}

CASES = (
    Case(
        "64 x 56 x 56",
        alone,
        map_of(64, 56),
        tests=[NARROW, {**WIDE, "relu": False, "moments": True, "channels_last": False}, EVEN, SINGLE],
        gpu=LARGE,
        dtypes=DTYPES,
    ),
    Case("128 x 28 x 28", alone, map_of(128, 28), gpu={**LARGE, "relu": False}, dtypes=DTYPES),
)
ADD_RELU = (
    Case(
        "256 x 56 x 56",
        add_relu,
        {**map_of(256, 56), "projected": False},
        tests=[
            {**NARROW, "moments": True},
            {**WIDE, "channels_last": False, "readers": (1,)},
            {**EVEN, "readers": (0,)},
        ],
        gpu=LARGE,
        dtypes=DTYPES,
    ),
    Case(
        "256 x 56 x 56, projected",
        add_relu,
        {**map_of(256, 56), "projected": True},
        tests=[NARROW, {**WIDE, "moments": True, "channels_last": False, "readers": (1,)}],
        gpu=LARGE,
        dtypes=DTYPES,
    ),
    Case("1024 x 14 x 14", add_relu, {**map_of(1024, 14), "projected": False}, gpu=LARGE, dtypes=DTYPES),
    Case("2048 x 7 x 7, projected", add_relu, {**map_of(2048, 7), "projected": True}, gpu=LARGE, dtypes=DTYPES),
)
RELU_MAX_POOL = (
    Case(
        "64 x 112 x 112",
        relu_max_pool,
        map_of(64, 112),
        tests=[
            {**NARROW, "pictures": 1},
            {**WIDE, "height": 7, "width": 5, "channels_last": False},
            {"pictures": 1, "channels": 16, "height": 16, "width": 8},
            SINGLE,
        ],
        gpu=LARGE,
        dtypes=DTYPES,
    ),
)
EVALUATE = (
    Case(
        "256 x 56 x 56",
        evaluate,
        map_of(256, 56),
        tests=[
            {**NARROW, "relu": False, "added": False},
            {**WIDE, "added": False, "channels_last": False},
            {**NARROW, "channels_last": False},
            {**NARROW, "projected": True},
        ],
        gpu={**LARGE, "projected": True},
        dtypes=DTYPES,
    ),
)
