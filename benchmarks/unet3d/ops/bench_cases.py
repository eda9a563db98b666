"""The cases of :mod:`benchmarks.unet3d.ops.bench`: every layer of the network at the sizes of a 128^3 crop.

Every case says how many calls of it a step has, candidates for something better none. Activations are
channels_last_3d, logits contiguous. Bytes are those that a pass must move: each input read once and each output written
once, but the input of a norm whose instances no multiprocessor can hold twice in each direction, and its gradients too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.unet3d.model import Architecture
from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm, output_convolution, upsample
from common.distributed.spatial import local
from common.distributed.spatial.local import LocalConvolution
from common.errors import SuiteError, UnsupportedImplementation
from common.ops.implementation import Implementation, OperationRequest

DEVICE = "cuda"
SIZE = 128
SMOOTH = 1e-6
HELD_VOXELS = 16**3
"""Voxels of an instance up to which a norm reads its input once."""

ARCHITECTURE = Architecture()
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


def norms() -> dict[tuple[int, int, int], int]:
    """Channels, size and readers of every norm, and how many have them."""
    found: dict[tuple[int, int, int], int] = {}
    for layer in layers():
        if layer.kernel == 3:
            skipped = not layer.name.startswith(("up", "bottleneck")) and layer.name.endswith("conv2")
            key = layer.filters, layer.size, 2 if skipped else 1
            found[key] = found.get(key, 0) + 1
    return found


def volumes(batch: int, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Normal values, channels_last_3d."""
    shape = (batch, channels, size, size, size)
    return torch.empty(shape, device=DEVICE, dtype=dtype, memory_format=torch.channels_last_3d).normal_()


def with_gradients(
    inputs: list[Tensor], gradients: list[Tensor], function: Callable[[], Tensor | tuple[Tensor, ...]]
) -> Callable[[], Any]:
    """Forward and backward of a function with autograd."""
    return lambda: torch.autograd.grad(function(), inputs, gradients)


# Convolutions


def convolution_case(
    function: Callable[[], LocalConvolution], batch: int, dtype: torch.dtype, *, layer: Layer
) -> list[Pass]:
    """Forward, gradient of the input but for an image, gradient of the weight."""
    convolution = function()
    x = volumes(batch, layer.channels, layer.size * layer.stride, dtype)
    dy = volumes(batch, layer.filters, layer.size, dtype)
    weight = volumes(layer.filters, layer.channels, layer.kernel, dtype)

    def backward(needs: tuple[bool, bool]) -> Any:
        return convolution.backward(dy, x, weight, layer.stride, needs)

    flops = batch * layer.flops
    moved = float((x.numel() + dy.numel() + weight.numel()) * dtype.itemsize)
    forward = Pass("forward", lambda: convolution.forward(x, weight, layer.stride), moved, flops)
    weight_gradient = Pass("weight gradient", lambda: backward((False, True)), moved, flops)
    if layer.channels == ARCHITECTURE.input_channels:
        return [forward, weight_gradient]
    return [forward, Pass("input gradient", lambda: backward((True, False)), moved, flops), weight_gradient]


def upsample_case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, layer: Layer) -> list[Pass]:
    """Transposed convolution and skip connection; backward has all four gradients."""
    x = volumes(batch, layer.channels, layer.size // 2, dtype).requires_grad_()
    skip = volumes(batch, layer.filters, layer.size, dtype).requires_grad_()
    weight = volumes(layer.channels, layer.filters, layer.kernel, dtype).requires_grad_()
    bias = torch.zeros(layer.filters, device=DEVICE, dtype=dtype, requires_grad=True)
    d_joined = volumes(batch, 2 * layer.filters, layer.size, dtype)

    def forward() -> Tensor:
        return function(x, weight, bias, skip)

    inner, outer = (float(tensor.numel() * dtype.itemsize) for tensor in (x, skip))
    backward = with_gradients([x, weight, bias, skip], [d_joined], forward)
    return [
        Pass("forward", forward, inner + 3 * outer, batch * layer.flops),
        Pass("backward", backward, 2 * inner + outer, 2 * batch * layer.flops, after="forward"),
    ]


def output_case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, layer: Layer) -> list[Pass]:
    """The last convolution; its logits' gradient comes in their own format, as the loss leaves it."""
    x = volumes(batch, layer.channels, layer.size, dtype).requires_grad_()
    weight = volumes(layer.filters, layer.channels, layer.kernel, dtype).requires_grad_()
    bias = torch.zeros(layer.filters, device=DEVICE, dtype=dtype, requires_grad=True)

    def forward() -> Tensor:
        return function(x, weight, bias)

    logits = forward().detach()
    backward = with_gradients([x, weight, bias], [torch.empty_like(logits).normal_()], forward)
    read, written = (float(tensor.numel() * dtype.itemsize) for tensor in (x, logits))
    return [
        Pass("forward", forward, read + written, batch * layer.flops),
        Pass("backward", backward, 2 * read + written, 2 * batch * layer.flops, after="forward"),
    ]


# Norm and loss


def norm_case(
    function: Callable[..., tuple[Tensor, Tensor]],
    batch: int,
    dtype: torch.dtype,
    *,
    channels: int,
    size: int,
    readers: int,
) -> list[Pass]:
    """With fp32 parameters; the second reader's gradient is a part of that of joined channels."""
    x = volumes(batch, channels, size, dtype).requires_grad_()
    dy = [volumes(batch, channels, size, dtype), volumes(batch, 2 * channels, size, dtype)[:, channels:]][:readers]
    weight = torch.ones(channels, device=DEVICE, requires_grad=True)
    bias = torch.zeros(channels, device=DEVICE, requires_grad=True)

    def forward() -> tuple[Tensor, ...]:
        return function(x, weight, bias, ARCHITECTURE.norm_epsilon)[:readers]

    unit = float(x.numel() * dtype.itemsize)
    held = size**3 <= HELD_VOXELS
    backward = 2 + readers if held else 3 + 2 * readers
    return [
        Pass("forward", forward, (2 if held else 3) * unit),
        Pass("backward", with_gradients([x, weight, bias], dy, forward), backward * unit, after="forward"),
    ]


def loss_case(
    function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, memory_format: torch.memory_format
) -> list[Pass]:
    """Of logits in one of the two formats; a step has contiguous ones."""
    logits = volumes(batch, ARCHITECTURE.classes, SIZE, dtype).contiguous(memory_format=memory_format)
    logits.requires_grad_()
    label = torch.randint(ARCHITECTURE.classes, (batch, SIZE, SIZE, SIZE), device=DEVICE, dtype=torch.uint8)
    one = torch.ones((), device=DEVICE)

    def forward() -> Tensor:
        return function(logits, label, SMOOTH)

    unit = float(logits.numel() * dtype.itemsize)
    return [
        Pass("forward", forward, unit + label.numel()),
        Pass("backward", with_gradients([logits], [one], forward), 2 * unit + label.numel(), after="forward"),
    ]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled by Inductor when it is first called."""
    return torch.compile(function, dynamic=False)


def _requested(
    implementation: Implementation, channels: int, build: Callable[..., list[Pass]], batch: int, dtype: torch.dtype
) -> list[Pass]:
    reason = implementation.unsupported(OperationRequest(torch.device(DEVICE), dtype, channels))
    if reason is not None:
        raise UnsupportedImplementation(reason)
    return build(implementation.function, batch, dtype)


def _each(
    name: str,
    implementations: Mapping[str, Implementation],
    chosen: str,
    channels: int,
    build: Callable[..., list[Pass]],
    calls: int = 1,
) -> list[Entry]:
    """An entry for every implementation; a step calls the chosen one."""
    return [
        Entry(
            f"{name} {implementation.name}",
            calls if implementation.name == chosen else 0,
            functools.partial(_requested, implementation, channels, build),
        )
        for implementation in implementations.values()
    ]


def _convolution_entries() -> list[Entry]:
    entries = []
    for layer in layers():
        if layer.kernel == 3:
            names = ["torch"]
            if layer.channels == ARCHITECTURE.input_channels:
                names.insert(0, "triton")
            elif layer.stride == 1 and layer.filters <= local.FOLDED_CHANNELS:
                names.insert(0, "folded")
            implementations = {name: local.IMPLEMENTATIONS[name] for name in names}
            build = functools.partial(convolution_case, layer=layer)
            entries += _each(f"conv {layer.name}", implementations, names[0], layer.channels, build)
    return entries


def _upsample_entries() -> list[Entry]:
    entries = []
    for layer in layers():
        if layer.kernel == 2:
            block, build = layer.name.removesuffix(".transposed"), functools.partial(upsample_case, layer=layer)
            entries += _each(f"upsample {block}", upsample.IMPLEMENTATIONS, "triton", layer.filters, build)
    return entries


def _output_entries() -> list[Entry]:
    layer = layers()[-1]
    build = functools.partial(output_case, layer=layer)
    return _each("output_convolution", output_convolution.IMPLEMENTATIONS, "triton", layer.channels, build)


def _norm_entries() -> list[Entry]:
    entries = []
    for (channels, size, readers), count in norms().items():
        build = functools.partial(norm_case, channels=channels, size=size, readers=readers)
        name = f"norm {channels}@{size}{' read twice' if readers == 2 else ''}"
        entries += _each(name, instance_norm.IMPLEMENTATIONS, "triton", channels, build, count)
    channels, size, readers = next(iter(norms()))  # the compiler takes seconds for each
    build = functools.partial(norm_case, channels=channels, size=size, readers=readers)
    plain = compiled(instance_norm.instance_norm_relu_plain)
    return [*entries, Entry(f"norm {channels}@{size} compiled", 0, functools.partial(build, plain))]


def _loss_entries() -> list[Entry]:
    losses = dice_cross_entropy.IMPLEMENTATIONS
    build = functools.partial(loss_case, memory_format=torch.contiguous_format)
    last = functools.partial(loss_case, memory_format=torch.channels_last_3d)
    return [
        *_each("loss", losses, "triton", ARCHITECTURE.classes, build),
        Entry("loss triton, NDHWC", 0, functools.partial(_requested, losses["triton"], ARCHITECTURE.classes, last)),
        Entry("loss compiled", 0, functools.partial(build, compiled(losses["plain"].function))),
    ]


def failures() -> tuple[type[BaseException], ...]:
    """What a case may raise without ending the others: ours, PyTorch's, and the compiler's where there is one."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _FAILURES
    return (*_FAILURES, TritonError)


def entries() -> list[Entry]:
    """Everything that can be measured, one kind after the other, the network's layers first to last."""
    return _convolution_entries() + _upsample_entries() + _output_entries() + _norm_entries() + _loss_entries()
