"""Products with a weight that is trained: forward, towards the input, and the weight's gradient, added to the main one.

In FP8 a weight is cast to e4m3 in the first forward pass of a step and kept for all of its micro-batches
(``WeightCasts``); activations are in e4m3, gradients in e5m2, all with delayed scales (:mod:`common.ops.fp8_cast`). A
Hopper GPU multiplies FP8 only where both operands run along the summed dimension in memory: the input gradient takes
the transpose of the weight, the weight's gradient those of input and gradient. They are made for the length of one
product, in memory that all layers share: 2 bytes an element, for Llama 3.1 8B and a row of 8,192 tokens 50 GB, some
2.5 % of its time. The alternative, producers that write both orders, needs kernels that hold tiles and not rows.

``torch._scaled_mm`` cannot add to what is there: the weight's gradient in FP8 is written and then added, which reads
and writes 8 bytes a weight where 4 would do. In 16 bits the product itself adds.

Without gradients, as in an evaluation, products are in the dtype of the weight.

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.nn.main_gradient import add_, finish, main_gradient
from common.nn.scratch import Scratch
from common.ops import fp8_cast, transpose_fp8
from common.ops.fp8_cast.plain import E4M3, E5M2, Fp8Tensor, Scaling
from common.ops.implementation import AUTO, OperationRequest, select
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, check_rows, check_weight, multiply

Operand = Tensor | Fp8Tensor
"""Rows as a product takes them."""


class TrainedProduct(Protocol):
    """A product whose operands its own casts make, or the operations before it with its scales."""

    @property
    def weight(self) -> nn.Parameter:
        """(O, I)."""
        ...

    def input_scaling(self, resting: bool) -> Scaling | None:
        """State of the scale of the input, for a producer that casts it; None where the product takes it as it is."""
        ...

    def gradient_scaling(self) -> Scaling | None:
        """State of the scale of the result's gradient, likewise."""
        ...

    def cast_input(self, x_TI: Tensor, resting: bool) -> Operand:
        """The input where its producer has not cast it; while ``resting``, as it is."""
        ...

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """A scale of before, for what makes the input again; it must not be moved."""
        ...

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Operand:
        """The input with a scale of before, for the weight's gradient."""
        ...

    def cast_gradient(self, dy_TO: Tensor) -> Operand:
        """The gradient where its producer has not cast it."""
        ...

    def multiply(self, x_TI: Operand, y_TO: Tensor | None = None) -> Tensor:
        """``y = x W^T``, in ``y_TO`` if that is given."""
        ...

    def input_gradient(self, dy_TO: Operand) -> Tensor:
        """``dx = dy W``."""
        ...

    def add_weight_gradient(self, dy_TO: Operand, x_TI: Operand) -> None:
        """``W.grad += dy^T x``, once in each backward pass."""
        ...


class HalfTrainedProduct:
    """The product in the dtype of the weight.

    Args:
        weight_OI: a parameter.
    """

    def __init__(self, weight_OI: nn.Parameter) -> None:
        self.weight = weight_OI

    def input_scaling(self, resting: bool) -> None:
        """No cast comes before this product."""

    def gradient_scaling(self) -> None:
        """No cast comes before its gradients."""

    def cast_input(self, x_TI: Tensor, resting: bool) -> Tensor:
        """The input itself."""
        return x_TI

    def scaling_of(self, scale_inverse: Tensor | None) -> None:
        """No cast comes before this product."""

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Tensor:
        """The input itself."""
        return x_TI

    def cast_gradient(self, dy_TO: Tensor) -> Tensor:
        """The gradient itself."""
        return dy_TO

    def multiply(self, x_TI: Operand, y_TO: Tensor | None = None) -> Tensor:
        """``y = x W^T``."""
        return half_product(x_TI, self.weight, y_TO)

    def input_gradient(self, dy_TO: Operand) -> Tensor:
        """``dx = dy W``."""
        assert isinstance(dy_TO, Tensor)
        return dy_TO @ self.weight

    def add_weight_gradient(self, dy_TO: Operand, x_TI: Operand) -> None:
        """``W.grad += dy^T x``."""
        assert isinstance(dy_TO, Tensor)
        assert isinstance(x_TI, Tensor)
        main_gradient(self.weight).addmm_(dy_TO.t(), x_TI)
        finish(self.weight)


def half_product(x_TI: Operand, weight_OI: Tensor, y_TO: Tensor | None) -> Tensor:
    """``x W^T`` in the dtype of both."""
    assert isinstance(x_TI, Tensor)
    return x_TI @ weight_OI.t() if y_TO is None else torch.mm(x_TI, weight_OI.t(), out=y_TO)


class Scales(nn.Module):
    """Delayed scales of some tensors, in buffers that a checkpoint has and that warm-up puts back.

    Args:
        count: of tensors.
        device: of the scales.

    Attributes:
        scales: fp32 (count,), of the next use of each; 0 before the first.
        pending: int32 (count, 2), scratch of the casts, zeros between them.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scales", torch.zeros(count, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(count, 2, dtype=torch.int32, device=device), persistent=False)

    def scaling(self, role: int) -> Scaling:
        """State of one."""
        return Scaling(self.scales[role], self.pending[role])


class WeightCasts:
    """When weights are cast: in every forward pass, or within ``once()`` in the first one only.

    Attributes:
        step: counts the times that weights may have changed; a product casts where it has another number.
    """

    def __init__(self) -> None:
        self.step = 0
        self._once = False

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Within it no weight changes. The host decides: a captured step casts in its first micro-batch."""
        self.step += 1
        self._once = True
        try:
            yield
        finally:
            self._once = False

    def begin(self) -> None:
        """A forward pass begins."""
        if not self._once:
            self.step += 1


class Fp8TrainedProduct:
    """The product in FP8.

    Args:
        weight_OI: a parameter, in the dtype of the activations.
        scales: of input, weight and gradient.
        scratch: what all layers share.
        casts: when the weight is cast.

    Raises:
        UnsupportedImplementation: O or I is not a multiple of 16.
    """

    def __init__(self, weight_OI: nn.Parameter, scales: Scales, scratch: Scratch, casts: WeightCasts) -> None:
        check_weight(weight_OI)
        self.weight = weight_OI
        self._scales, self._scratch, self._casts = scales, scratch, casts
        device = weight_OI.device
        request = OperationRequest(device, weight_OI.dtype)
        self._cast = select(fp8_cast.IMPLEMENTATIONS, AUTO, request).function
        transposing = OperationRequest(device, E4M3)
        self._transpose = select(transpose_fp8.IMPLEMENTATIONS, AUTO, transposing).function
        # memory of its own, so that graphs keep the address
        self._weight8 = torch.empty(weight_OI.shape, dtype=E4M3, device=device)
        self._weight_inverse = torch.ones((), dtype=torch.float32, device=device)
        self._step = -1

    def input_scaling(self, resting: bool) -> Scaling | None:
        """State of the scale of the input."""
        return None if resting else self._scales.scaling(INPUT)

    def gradient_scaling(self) -> Scaling | None:
        """State of the scale of the result's gradient."""
        return self._scales.scaling(GRADIENT)

    def cast_input(self, x_TI: Tensor, resting: bool) -> Operand:
        """The input in e4m3."""
        if resting:
            return x_TI
        result: Fp8Tensor = self._cast(x_TI, self._scales.scaling(INPUT), E4M3, False)
        return result

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """A scale of before."""
        assert scale_inverse is not None
        return Scaling(scale_inverse.reciprocal(), self._scales.pending[INPUT])

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """The input in e4m3 with a scale of before, transposed too."""
        result: Fp8Tensor = self._cast(x_TI, self.scaling_of(scale_inverse), E4M3, True, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """The gradient in e5m2, transposed too."""
        result: Fp8Tensor = self._cast(dy_TO.contiguous(), self._scales.scaling(GRADIENT), E5M2, True)
        return result

    def multiply(self, x_TI: Operand, y_TO: Tensor | None = None) -> Tensor:
        """``y = x W^T``."""
        if not isinstance(x_TI, Fp8Tensor):
            return half_product(x_TI, self.weight, y_TO)
        check_rows(len(x_TI.data))
        if self._step != self._casts.step:
            self._cast_weight()
        return multiply(x_TI.data, self._weight8, x_TI.scale_inverse, self._weight_inverse, self.weight.dtype, out=y_TO)

    def input_gradient(self, dy_TO: Operand) -> Tensor:
        """``dx = dy W``."""
        assert isinstance(dy_TO, Fp8Tensor)
        weight_IO = self._turned(self._weight8, "turned weight")
        return multiply(dy_TO.data, weight_IO, dy_TO.scale_inverse, self._weight_inverse, self.weight.dtype)

    def add_weight_gradient(self, dy_TO: Operand, x_TI: Operand) -> None:
        """``W.grad += dy^T x``."""
        assert isinstance(dy_TO, Fp8Tensor)
        assert isinstance(x_TI, Fp8Tensor)
        dy_OT = self._turned(dy_TO.data, "turned gradient") if dy_TO.transposed is None else dy_TO.transposed
        x_IT = self._turned(x_TI.data, "turned input") if x_TI.transposed is None else x_TI.transposed
        own_OI = self._scratch.slot("weight gradient", self.weight.shape, self.weight.dtype)
        multiply(dy_OT, x_IT, dy_TO.scale_inverse, x_TI.scale_inverse, self.weight.dtype, out=own_OI)
        add_(self.weight, own_OI)

    def _cast_weight(self) -> None:
        cast: Fp8Tensor = self._cast(self.weight.detach(), self._scales.scaling(WEIGHT), E4M3, False)
        self._weight8.copy_(cast.data)
        self._weight_inverse.copy_(cast.scale_inverse)
        self._step = self._casts.step

    def _turned(self, matrix_NK: Tensor, slot: str) -> Tensor:
        room = self._scratch.slot(slot, matrix_NK.shape[::-1], matrix_NK.dtype)
        transposed: Tensor = self._transpose(matrix_NK, room)
        return transposed


def products_of(
    layer: Any, linear: str, scratch: Scratch, casts: WeightCasts
) -> HalfTrainedProduct | Fp8TrainedProduct:
    """The product of a layer with a weight, whose scales become a part of it.

    Args:
        layer: has ``weight``.
        linear: ``torch`` or ``fp8``.
        scratch, casts: see :class:`Fp8TrainedProduct`.
    """
    if linear == "torch":
        return HalfTrainedProduct(layer.weight)
    layer.fp8 = Scales(3, layer.weight.device)
    return Fp8TrainedProduct(layer.weight, layer.fp8, scratch, casts)
