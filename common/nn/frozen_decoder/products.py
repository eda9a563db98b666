"""Products with a frozen weight, forward and towards the input: what a decoder block needs of them and no more.

There is no gradient of the weight, so the input is not kept. In FP8 a weight has one scale and is cast while it is
loaded, never whole in a wider dtype beside it; a Hopper GPU multiplies FP8 only where both operands run along the
summed dimension in memory, so the input gradient goes through a transposed copy that lives for the length of the
product.
Activations are cast to e4m3, gradients to e5m2, with delayed scales (:mod:`common.ops.fp8_cast`).

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.errors import UnsupportedImplementation
from common.nn.decoder import DecoderArchitecture
from common.ops import fp8_cast, transpose_fp8
from common.ops.fp8_cast.plain import E4M3, E5M2, Fp8Tensor, Scaling
from common.ops.implementation import AUTO, OperationRequest, select
from common.ops.linear import fp8
from common.ops.linear.fp8 import multiply

INPUT, GRADIENT = range(2)
ROWS_AT_ONCE = 1024
"""Rows of a weight that are widened at a time while it is cast."""


class Scratch:
    """Memory that all layers use one after another for what is large and short-lived.

    An allocator would cut pieces that a layer keeps out of it as soon as it is free, and the next layer would need as
    much again. It grows when a larger size comes, to another address: ask for the largest before a graph is captured.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Tensor] = {}

    def wide(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A result as wide as the MLP; its values are valid until the next is asked for."""
        return self._slot("wide", shape, dtype)

    def turned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A transposed weight, likewise."""
        return self._slot("turned", shape, dtype)

    def _slot(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        needed = math.prod(shape) * dtype.itemsize
        if name not in self._slots or self._slots[name].numel() < needed:
            self._slots.pop(name, None)
            self._slots[name] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._slots[name][:needed].view(dtype).view(shape)


class FrozenProduct(Protocol):
    """A product whose operands its own casts make: a tensor as it is, or an :class:`Fp8Tensor`."""

    @property
    def weight(self) -> Tensor:
        """(O, I)."""
        ...

    def input_scaling(self) -> Scaling | None:
        """State of the scale of the input, for a producer that casts it; None where none does."""
        ...

    def gradient_scaling(self) -> Scaling | None:
        """State of the scale of the result's gradient, likewise."""
        ...

    def cast_input(self, x_TI: Tensor, resting: bool) -> Any:
        """The input where its producer has not cast it; ``resting`` leaves the scale as it is."""
        ...

    def cast_with(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Any:
        """The input with a scale of before."""
        ...

    def cast_gradient(self, dy_TO: Tensor) -> Any:
        """The gradient where its producer has not cast it."""
        ...

    def __call__(self, x_TI: Any, out: Tensor | None = None) -> Tensor:
        """``x W^T``, in ``out`` if given."""
        ...

    def input_gradient(self, dy_TO: Any, scratch: Scratch, out: Tensor | None = None) -> Tensor:
        """``dy W``, in ``out`` if given; the scratch is used up until it returns."""
        ...


class HalfProduct:
    """The product in the dtype of the weight.

    Args:
        weight_OI: frozen.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.weight = weight_OI

    def input_scaling(self) -> None:
        """No cast comes before this product."""

    def gradient_scaling(self) -> None:
        """No cast comes before its input gradient."""

    def cast_input(self, x_TI: Tensor, resting: bool) -> Tensor:
        """The input itself."""
        return x_TI

    def cast_with(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Tensor:
        """The input itself."""
        return x_TI

    def cast_gradient(self, dy_TO: Tensor) -> Tensor:
        """The gradient itself."""
        return dy_TO

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """``x W^T``, in ``out`` if given."""
        return torch.mm(x_TI, self.weight.t(), out=out)

    def input_gradient(self, dy_TO: Tensor, scratch: Scratch, out: Tensor | None = None) -> Tensor:
        """``dy W``, in ``out`` if given."""
        return torch.mm(dy_TO, self.weight, out=out)


class Fp8FrozenProduct(nn.Module):
    """The product in FP8.

    Args:
        weight_OI: of any floating dtype, on the device; it is read once.
        dtype: of results.

    Attributes:
        weight: e4m3 (O, I).
        scale_inverse: 0-d fp32, of the weight.
        scales: fp32 (2,), of the next input and the next gradient; 0 before the first use.
        pending: int32 (2, 2), scratch of the casts, zeros between them.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, weight_OI: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        device = weight_OI.device
        self.dtype = dtype
        request = OperationRequest(device, dtype)
        self._cast = select(fp8_cast.IMPLEMENTATIONS, AUTO, request).function
        transposing = OperationRequest(device, E4M3)
        self._transpose = select(transpose_fp8.IMPLEMENTATIONS, AUTO, transposing).function
        data, scale_inverse = cast_weight(weight_OI)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.scale_inverse = nn.Parameter(scale_inverse, requires_grad=False)
        self.register_buffer("scales", torch.zeros(2, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(2, 2, dtype=torch.int32, device=device), persistent=False)

    def input_scaling(self) -> Scaling:
        """State of the scale of the input."""
        return Scaling(self.scales[INPUT], self.pending[INPUT])

    def gradient_scaling(self) -> Scaling:
        """State of the scale of the result's gradient."""
        return Scaling(self.scales[GRADIENT], self.pending[GRADIENT])

    def cast_input(self, x_TI: Tensor, resting: bool) -> Fp8Tensor:
        """The input in e4m3, where its producer has not cast it; ``resting`` leaves the scale as it is."""
        result: Fp8Tensor = self._cast(x_TI, self.input_scaling(), E4M3, False, resting)
        return result

    def cast_with(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """The input in e4m3 with a scale of before."""
        assert scale_inverse is not None
        scaling = Scaling(scale_inverse.reciprocal(), self.pending[INPUT])
        result: Fp8Tensor = self._cast(x_TI, scaling, E4M3, False, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """The gradient in e5m2, where its producer has not cast it."""
        result: Fp8Tensor = self._cast(dy_TO, self.gradient_scaling(), E5M2, False, False)
        return result

    def forward(self, x8_TI: Fp8Tensor, out: Tensor | None = None) -> Tensor:
        """``x W^T``, in ``out`` if given."""
        scales = (x8_TI.scale_inverse, self.scale_inverse)
        return multiply(x8_TI.data, self.weight, *scales, self.dtype, out=out)

    def input_gradient(self, dy8_TO: Fp8Tensor, scratch: Scratch, out: Tensor | None = None) -> Tensor:
        """``dy W``, in ``out`` if given; the scratch is used up until it returns."""
        transposed_IO = scratch.turned(self.weight.shape[::-1], E4M3)
        self._transpose(self.weight, transposed_IO)
        scales = (dy8_TO.scale_inverse, self.scale_inverse)
        return multiply(dy8_TO.data, transposed_IO, *scales, self.dtype, out=out)

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8FrozenProduct:
        """Move, but never cast."""
        raise TypeError("an FP8 weight stays where it was cast")


def check_fp8(
    architecture: DecoderArchitecture, ranks: int, tokens: Sequence[int], device: torch.device, dtype: torch.dtype
) -> None:
    """Make sure that FP8 products of these sizes can run, before any weight is read.

    Args:
        architecture: of the decoder.
        ranks: that share each layer.
        tokens: of the micro-batches, as a rank's products have them.
        device, dtype: of activations.

    Raises:
        UnsupportedImplementation: naming ``model.linear=fp8`` and what stands against it.
    """
    shape = architecture
    split = (shape.qkv_features, shape.attention_features, shape.feed_forward)
    for size in (shape.hidden, *(features // ranks for features in split)):
        reason = fp8.unsupported(OperationRequest(device, dtype, {"columns": size}))
        if reason is not None:
            raise UnsupportedImplementation(f"model.linear=fp8: {reason}")
    for count in tokens:
        if count % fp8.MULTIPLE:
            raise UnsupportedImplementation(
                f"model.linear=fp8: a product of {count} tokens; FP8 needs a multiple of {fp8.MULTIPLE}"
            )


@torch.no_grad()
def cast_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in e4m3 with the one scale that uses the format's whole range, and the scale's inverse (0-d fp32)."""
    parts = weight_OI.split(ROWS_AT_ONCE)
    amax = torch.stack([part.abs().amax() for part in parts]).amax().float()
    largest = torch.finfo(E4M3).max
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    data = torch.empty(weight_OI.shape, dtype=E4M3, device=weight_OI.device)
    for part, target in zip(parts, data.split(ROWS_AT_ONCE), strict=True):
        target.copy_((part.float() * scale).clamp(-largest, largest).to(E4M3))
    return data, scale.reciprocal()
