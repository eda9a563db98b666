"""The cases of :mod:`benchmarks.unet3d.ops.bench`: every layer of the network at the sizes of a 128^3 crop.

Every case says how many calls of it a step has, candidates for something better none. Activations are
channels_last_3d. Bytes are those that a pass must move: each input read once and each output written once, but the
input of a norm whose instances no multiprocessor can hold twice in each direction, and its gradient too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.unet3d.model import Architecture
from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm
from common.errors import SuiteError, UnsupportedImplementation
from common.ops.implementation import Implementation, OperationRequest

SIZE = 128
SMOOTH = 1e-6
HELD_VOXELS = 16**3
"""Voxels of an instance up to which a norm reads its input once."""

ARCHITECTURE = Architecture()
aten = torch.ops.aten
_FAILURES = (RuntimeError, ImportError, AttributeError, TypeError, ValueError, AssertionError, SuiteError)


class Pass(NamedTuple):
    """One direction of an operation.

    Attributes:
        name: ``forward``, or another.
        run: enqueues it.
        bytes: what it must move.
        flops: where arithmetic counts.
        after: an earlier pass that ``run`` repeats first and whose time is subtracted.
    """

    name: str
    run: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    after: str | None = None


class Entry(NamedTuple):
    """An operation at the size of a layer, in one implementation.

    Attributes:
        name: operation, layer, implementation.
        calls: in a step; 0 for what a step does not run.
        build: its passes for a batch of samples in a dtype.
    """

    name: str
    calls: int
    build: Callable[[int, torch.dtype], list[Pass]]


class Layer(NamedTuple):
    """A convolution: channels in and out, voxels of an axis of its output, kernel and stride."""

    name: str
    channels: int
    filters: int
    size: int
    kernel: int = 3
    stride: int = 1

    @property
    def flops(self) -> float:
        """Of forward for one sample; every voxel of a transposed convolution has a single tap."""
        taps = 1 if self.kernel == 2 else self.kernel**3
        return 2.0 * self.channels * self.filters * taps * self.size**3


def layers() -> list[Layer]:
    """The convolutions of the network, in order; transposed ones have a kernel of 2."""
    first = ARCHITECTURE.filters[0]
    found = [
        Layer("input_block.conv1", ARCHITECTURE.input_channels, first, SIZE),
        Layer("input_block.conv2", first, first, SIZE),
    ]
    for level, (name, narrow, wide) in enumerate(ARCHITECTURE.down, 1):
        found += [
            Layer(f"{name}.conv1", narrow, wide, SIZE >> level, stride=2),
            Layer(f"{name}.conv2", wide, wide, SIZE >> level),
        ]
    for level, (name, wide, narrow) in zip(reversed(range(len(ARCHITECTURE.up))), ARCHITECTURE.up, strict=True):
        found += [
            Layer(f"{name}.transposed", wide, narrow, SIZE >> level, kernel=2, stride=2),
            Layer(f"{name}.conv1", 2 * narrow, narrow, SIZE >> level),
            Layer(f"{name}.conv2", narrow, narrow, SIZE >> level),
        ]
    return [*found, Layer("output", first, ARCHITECTURE.classes, SIZE, kernel=1)]


def norms() -> dict[tuple[int, int], int]:
    """Channels and size of every norm, and how many have them."""
    found: dict[tuple[int, int], int] = {}
    for layer in layers():
        if layer.kernel == 3:
            found[layer.filters, layer.size] = found.get((layer.filters, layer.size), 0) + 1
    return found


def volumes(batch: int, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Normal values, channels_last_3d."""
    shape = (batch, channels, size, size, size)
    return torch.empty(shape, device="cuda", dtype=dtype, memory_format=torch.channels_last_3d).normal_()


def with_gradients(function: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    """Forward and backward of a function with autograd."""
    return lambda: torch.autograd.grad(function(), inputs, gradient)


# Convolutions


def convolution_case(layer: Layer, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Forward, gradient of the input but for the image, gradient of the weight."""
    transposed = layer.kernel == 2
    size = layer.size // 2 if transposed else layer.size * layer.stride
    pair = (layer.channels, layer.filters) if transposed else (layer.filters, layer.channels)
    x, dy = volumes(batch, layer.channels, size, dtype), volumes(batch, layer.filters, layer.size, dtype)
    weight = volumes(pair[0], pair[1], layer.kernel, dtype)
    bias = torch.zeros(layer.filters, device="cuda", dtype=dtype) if layer.kernel < 3 else None
    settings = (
        [layer.stride] * 3,
        [layer.kernel // 2 if layer.kernel == 3 else 0] * 3,
        [1] * 3,
        transposed,
        [0] * 3,
        1,
    )
    bias_sizes = None if bias is None else [layer.filters]

    def backward(*wanted: bool) -> Any:
        return aten.convolution_backward(dy, x, weight, bias_sizes, *settings, wanted)

    flops = batch * layer.flops
    moved = float((x.numel() + dy.numel() + weight.numel()) * dtype.itemsize)
    passes = [
        Pass("forward", lambda: aten.convolution(x, weight, bias, *settings), moved, flops),
        Pass("weight gradient", lambda: backward(False, True, bias is not None), moved, flops),
    ]
    if layer.name != "input_block.conv1":
        passes.insert(1, Pass("input gradient", lambda: backward(True, False, False), moved, flops))
    return passes


def padded_first_case(batch: int, dtype: torch.dtype) -> list[Pass]:
    """The first convolution with its one channel padded to eight, the padding included."""
    layer = layers()[0]
    image = volumes(batch, 1, SIZE, dtype)
    weight = volumes(layer.filters, 8, 3, dtype)
    dy = volumes(batch, layer.filters, SIZE, dtype)
    settings = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)

    def padded() -> Tensor:
        x = image.new_zeros((batch, SIZE, SIZE, SIZE, 8)).permute(0, 4, 1, 2, 3)
        x[:, :1] = image
        return x

    x = padded()
    moved = float((image.numel() + dy.numel()) * dtype.itemsize)
    flops = 2.0 * layer.filters * 27 * image.numel()
    return [
        Pass("forward", lambda: aten.convolution(padded(), weight, None, *settings), moved, flops),
        Pass(
            "weight gradient",
            lambda: aten.convolution_backward(dy, x, weight, None, *settings, (False, True, False)),
            moved,
            flops,
        ),
    ]


def product_case(layer: Layer, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Forward of a transposed or 1x1x1 convolution as a matrix product over voxels, then a copy where voxels move."""
    transposed = layer.kernel == 2
    size = layer.size // 2 if transposed else layer.size
    x = volumes(batch, layer.channels, size, dtype)
    rows = x.permute(0, 2, 3, 4, 1).reshape(-1, layer.channels)
    columns = layer.filters * (8 if transposed else 1)
    weight = torch.randn(columns, layer.channels, device="cuda", dtype=dtype)
    bias = torch.zeros(columns, device="cuda", dtype=dtype)

    def forward() -> Tensor:
        y = F.linear(rows, weight, bias)
        if not transposed:
            return y
        return y.view(batch, size, size, size, 2, 2, 2, layer.filters).permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous()

    voxels = batch * layer.size**3
    moved = float((x.numel() + voxels * layer.filters) * dtype.itemsize)
    return [Pass("forward", forward, moved, batch * layer.flops)]


# Concatenation


def concatenation_case(channels: int, size: int, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Of the transposed convolution's result and the skip; backward with the sum of the skip's two gradients."""
    up, skip = (volumes(batch, channels, size, dtype) for _ in range(2))
    d_both, d_skip = volumes(batch, 2 * channels, size, dtype), volumes(batch, channels, size, dtype)

    def backward() -> tuple[Tensor, Tensor]:
        d_up = d_both[:, :channels].contiguous(memory_format=torch.channels_last_3d)
        return d_up, d_both[:, channels:] + d_skip

    unit = float(up.numel() * dtype.itemsize)
    return [
        Pass("forward", lambda: torch.cat((up, skip), 1), 4 * unit),
        Pass("backward", backward, 5 * unit),
    ]


# Norm and loss


def norm_case(function: Callable[..., Tensor], channels: int, size: int, batch: int, dtype: torch.dtype) -> list[Pass]:
    """With fp32 parameters."""
    x = volumes(batch, channels, size, dtype).requires_grad_()
    dy = volumes(batch, channels, size, dtype)
    weight = torch.ones(channels, device="cuda", requires_grad=True)
    bias = torch.zeros(channels, device="cuda", requires_grad=True)

    def forward() -> Tensor:
        return function(x, weight, bias, ARCHITECTURE.norm_epsilon)

    unit = float(x.numel() * dtype.itemsize)
    units = (2, 3) if size**3 <= HELD_VOXELS else (3, 5)
    return [
        Pass("forward", forward, units[0] * unit),
        Pass("backward", with_gradients(forward, [x, weight, bias], dy), units[1] * unit, after="forward"),
    ]


def loss_case(
    function: Callable[..., Tensor], memory_format: torch.memory_format, batch: int, dtype: torch.dtype
) -> list[Pass]:
    """Of logits in one of the two formats."""
    logits = volumes(batch, ARCHITECTURE.classes, SIZE, dtype).contiguous(memory_format=memory_format)
    logits.requires_grad_()
    label = torch.randint(ARCHITECTURE.classes, (batch, SIZE, SIZE, SIZE), device="cuda", dtype=torch.uint8)
    one = torch.ones((), device="cuda")

    def forward() -> Tensor:
        return function(logits, label, SMOOTH)

    unit = float(logits.numel() * dtype.itemsize)
    return [
        Pass("forward", forward, unit + label.numel()),
        Pass("backward", with_gradients(forward, [logits], one), 2 * unit + label.numel(), after="forward"),
    ]


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled by Inductor when it is first called."""
    return torch.compile(function, dynamic=False)


def _requested(
    implementation: Implementation, channels: int, build: Callable[..., list[Pass]], batch: int, dtype: torch.dtype
) -> list[Pass]:
    reason = implementation.unsupported(OperationRequest(torch.device("cuda"), dtype, channels))
    if reason is not None:
        raise UnsupportedImplementation(reason)
    return build(implementation.function, batch=batch, dtype=dtype)


def _norm_entries() -> list[Entry]:
    entries = []
    for (channels, size), count in norms().items():
        build = functools.partial(norm_case, channels=channels, size=size)
        for implementation in instance_norm.IMPLEMENTATIONS.values():
            name = f"norm {channels}@{size} {implementation.name}"
            calls = count if implementation.name == "triton" else 0
            entries.append(Entry(name, calls, functools.partial(_requested, implementation, channels, build)))
        plain = compiled(instance_norm.instance_norm_relu_plain)
        entries.append(Entry(f"norm {channels}@{size} compiled", 0, functools.partial(build, plain)))
    return entries


def _loss_entries() -> list[Entry]:
    build = functools.partial(loss_case, memory_format=torch.channels_last_3d)
    entries = [
        Entry(
            f"loss {implementation.name}",
            int(implementation.name == "triton"),
            functools.partial(_requested, implementation, ARCHITECTURE.classes, build),
        )
        for implementation in dice_cross_entropy.IMPLEMENTATIONS.values()
    ]
    plain, kernels = dice_cross_entropy.IMPLEMENTATIONS["plain"], dice_cross_entropy.IMPLEMENTATIONS["triton"]
    contiguous = functools.partial(loss_case, memory_format=torch.contiguous_format)
    return [
        *entries,
        Entry("loss triton, NCDHW", 0, functools.partial(_requested, kernels, ARCHITECTURE.classes, contiguous)),
        Entry("loss compiled", 0, functools.partial(build, compiled(plain.function))),
    ]


def failures() -> tuple[type[BaseException], ...]:
    """What a case may raise without ending the others: ours, PyTorch's, and the compiler's where there is one."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _FAILURES
    return (*_FAILURES, TritonError)


def entries() -> list[Entry]:
    """Everything that can be measured: the network first to last, then the loss, then candidates."""
    found = [Entry(f"conv {layer.name}", 1, functools.partial(convolution_case, layer)) for layer in layers()]
    for layer in layers():
        if layer.kernel == 2:
            name, channels, size = layer.name.removesuffix(".transposed"), layer.filters, layer.size
            found.append(Entry(f"cat {name}", 1, functools.partial(concatenation_case, channels, size)))
    found += _norm_entries() + _loss_entries()
    found.append(Entry("conv input_block.conv1, 8 channels", 0, padded_first_case))
    return found + [
        Entry(f"product {layer.name}", 0, functools.partial(product_case, layer))
        for layer in layers()
        if layer.kernel < 3
    ]
