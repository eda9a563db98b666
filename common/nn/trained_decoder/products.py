"""Products with a weight that is trained: forward, towards the input, and the weight's gradient, added to the main one.

In FP8 a weight is cast to e4m3 in the first forward pass of a step and kept for all of its micro-batches
(:mod:`.casts`); activations are in e4m3, gradients in e5m2, all with delayed scales (:mod:`common.ops.fp8_cast`). A
Hopper GPU multiplies FP8 only where both operands run along the summed dimension in memory: the input gradient takes
the transpose of the weight, the weight's gradient those of input and gradient. They are made for the length of one
product, in memory that all layers share: 2 bytes an element, for Llama 3.1 8B and a row of 8,192 tokens 50 GB, some
2.5 % of its time. The alternative, producers that write both orders, needs kernels that hold tiles and not rows, and
saves one of the two bytes. A weight's transpose may be kept for the step (``keep_turned``): another byte a weight, and
of GPT-3's layers over four ranks, whose weights are 1.3 times as many as the elements of a micro-batch's operands, it
spares 0.2 of some 10 ms each time.

How a weight's gradient in FP8 is added to the main one is chosen by name (:mod:`common.ops.weight_gradient`). In 16
bits the product itself adds.

Where ranks share a layer, tokens move between them (:mod:`.movement`). For a weight's gradient in FP8 all rows need the
same scale; those of ranks with a larger one are rounded again while they are transposed.

Without gradients (``inference``), for example in an evaluation, inputs and weights are cast with the scales that the
next step of training would use, which stay as they are. If none is known yet, a weight takes the scale of its own
maximum, and an input that of a sample of its rows. Weights are cast once for all passes of an evaluation
(``WeightCasts.evaluating``), and before them, so that no graph casts them again for every micro-batch; the next step
casts them anew.

Legend: T tokens, n any rows, I input features, O output features of this rank; K summed over, N columns of a result.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.products import RowProduct, TokenProducts, times
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.nn.frozen_decoder.products import Operand, data_and_scale
from common.nn.main_gradient import finish, main_gradient
from common.nn.scratch import Scratch
from common.nn.trained_decoder.casts import Scales, WeightCasts
from common.nn.trained_decoder.movement import (
    STAYING,
    GatheredFp8,
    Gathering,
    LocalProduct,
    Movement,
    Scattering,
    movement_of,
)
from common.ops import fp8_cast, transpose_fp8, weight_gradient
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, scale_of
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, check_rows, check_weight, multiply
from common.ops.operation import AUTO, OPTION, OperationRequest, asked_for
from common.ops.weight_gradient.half import add_product_


class TrainedProduct(Protocol):
    """A product whose operands its own casts make, or the operations before it with its scales.

    Of a column-parallel product the input and its gradient are of a rank's own tokens, of a row-parallel one the
    result and its gradient; what is said below of rows is of these.
    """

    @property
    def weight(self) -> nn.Parameter:
        """(O, I), of this rank."""
        ...

    def input_scaling(self) -> Scaling | None:
        """State of the scale of the input, for a producer that casts it; None where the product takes it as it is."""
        ...

    def frozen(self, inference: bool) -> bool:
        """Whether the operation that casts the input leaves its scale as it is.

        ``inference`` says that no gradients are wanted.
        """
        ...

    def gradient_scaling(self) -> Scaling | None:
        """State of the scale of the result's gradient, likewise."""
        ...

    def cast_input(self, x_TI: Tensor, inference: bool) -> Operand:
        """The input where its producer has not cast it."""
        ...

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """A scale of before, for what makes the input again; it must not be moved."""
        ...

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Operand:
        """The input with a scale of before, for the backward pass."""
        ...

    def cast_gradient(self, dy_TO: Tensor) -> Operand:
        """The gradient where its producer has not cast it."""
        ...

    def prepare(self) -> None:
        """Cast the weight now if the next forward pass would; within :meth:`WeightCasts.once` that is what it casts."""
        ...

    def result_rows(self, rows: int) -> int:
        """Rows of the result for so many rows of the input."""
        ...

    def multiply(self, x: Operand, y: Tensor | None = None) -> Tensor:
        """``y = x W^T``, and the bias if it has one, in ``y`` if that is given. Collective."""
        ...

    def backward(self, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main one, once in each backward pass; the input's. Collective."""
        ...


class _Moving(ABC):
    """What products have in common: their tokens move."""

    weight: nn.Parameter
    _movement: Movement

    def result_rows(self, rows: int) -> int:
        """Rows of the result for so many rows of the input."""
        return self._movement.result_rows(rows)

    def multiply(self, x: Operand, y: Tensor | None = None) -> Tensor:
        """``y = x W^T``, and the bias."""
        rows, columns = self.result_rows(len(data_and_scale(x)[0])), len(self.weight)
        y = self.weight.new_empty(rows, columns) if y is None else y
        self._movement.multiply(self._own(), x, y)
        return y

    def backward(self, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main one; the input's."""
        return self._movement.backward(self._own(), dy, x)

    @abstractmethod
    def _own(self) -> LocalProduct:
        """What this rank multiplies by itself."""


class HalfTrainedProduct(_Moving):
    """The product in the dtype of the weight.

    Args:
        weight_OI: a parameter.
        bias_O: of the result; its gradient is the caller's.
        movement: of tokens between the ranks that share the product.
    """

    def __init__(
        self, weight_OI: nn.Parameter, bias_O: nn.Parameter | None = None, movement: Movement = STAYING
    ) -> None:
        self.weight, self._bias, self._movement = weight_OI, bias_O, movement

    def input_scaling(self) -> None:
        """No cast comes before this product."""

    def frozen(self, inference: bool) -> bool:
        """There is no scale."""
        return True

    def gradient_scaling(self) -> None:
        """No cast comes before its gradients."""

    def cast_input(self, x_TI: Tensor, inference: bool) -> Tensor:
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

    def prepare(self) -> None:
        """The weight is not cast."""

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """``y = x W^T + bias``."""
        weight_IO = self.weight.detach().t()
        if self._bias is None:
            torch.mm(x_nI, weight_IO, out=y_nO)
        else:  # the library's product adds the bias in its epilogue
            torch.addmm(self._bias.detach(), x_nI, weight_IO, out=y_nO)

    def towards_input(self) -> RowProduct:
        """``dx = dy W``."""
        return times(self.weight.detach())

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Rows of this product have no scale."""
        raise TypeError("a product in the dtype of its weight has no scales")

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """``W.grad += dy^T x``."""
        assert isinstance(dy_TO, Tensor)
        assert isinstance(x_TI, Tensor)
        add_product_(main_gradient(self.weight), dy_TO, x_TI)
        finish(self.weight)

    def _own(self) -> LocalProduct:
        return self


class Fp8TrainedProduct(_Moving):
    """The product in FP8.

    Args:
        weight_OI: a parameter, in the dtype of the activations.
        scales: of input, weight and gradient.
        scratch: what all layers share.
        casts: when the weight is cast.
        bias_O: of the result; its gradient is the caller's.
        movement: of tokens between the ranks that share the product.
        accumulation: how the weight's gradient is added, one of :mod:`common.ops.weight_gradient`.
        keep_turned: keep the cast weight's transpose for the step as well.
        own_eval_scales: whether an evaluation starts with unknown scales and updates them, on ranks that do not train.
            Otherwise, it uses the scales of training and does not change them.

    Raises:
        UnsupportedImplementation: O or I is not a multiple of 16, or there is no such accumulation here.
    """

    def __init__(
        self,
        weight_OI: nn.Parameter,
        scales: Scales,
        scratch: Scratch,
        casts: WeightCasts,
        bias_O: nn.Parameter | None = None,
        movement: Movement = STAYING,
        accumulation: str = AUTO,
        keep_turned: bool = False,
        own_eval_scales: bool = False,
    ) -> None:
        check_weight(weight_OI)
        self.weight, self._bias, self._movement = weight_OI, bias_O, movement
        self._scales, self._scratch, self._casts, self._own_eval_scales = scales, scratch, casts, own_eval_scales
        casts.before_evaluations(self._begin_evaluation)
        device = weight_OI.device
        request = OperationRequest(device, weight_OI.dtype)
        self._cast = fp8_cast.FP8_CAST.select(AUTO, request).function
        transposing = OperationRequest(device, E4M3)
        self._transpose = transpose_fp8.TRANSPOSE_FP8.select(AUTO, transposing).function
        with asked_for(f"{OPTION}.accumulation", accumulation):
            self._accumulate = weight_gradient.WEIGHT_GRADIENT.select(accumulation, request).function
        # memory of its own, so that graphs keep the address
        self._weight8 = torch.empty(weight_OI.shape, dtype=E4M3, device=device)
        self._weight8_IO = self._weight8.new_empty(weight_OI.shape[::-1]) if keep_turned else None
        self._weight_inverse = torch.ones((), dtype=torch.float32, device=device)
        self._step = -1

    def input_scaling(self) -> Scaling:
        """State of the scale of the input."""
        return self._scales.scaling(INPUT)

    def frozen(self, inference: bool) -> bool:
        """Whether the scale of the input stays as it is."""
        return inference and not self._own_eval_scales

    def gradient_scaling(self) -> Scaling | None:
        """State of the scale of the result's gradient."""
        return self._scales.scaling(GRADIENT)

    def cast_input(self, x_TI: Tensor, inference: bool) -> Fp8Tensor:
        """The input in e4m3."""
        result: Fp8Tensor = self._cast(x_TI, self.input_scaling(), E4M3, False, self.frozen(inference))
        return result

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """A scale of before."""
        assert scale_inverse is not None
        return Scaling(scale_inverse.reciprocal(), self._scales.pending[INPUT])

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """The input in e4m3 with a scale of before; transposed too, unless others' tokens are yet to join it."""
        alone = not isinstance(self._movement, Gathering)
        result: Fp8Tensor = self._cast(x_TI, self.scaling_of(scale_inverse), E4M3, alone, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """The gradient in e5m2; transposed too, unless others' tokens are yet to join it."""
        alone = not isinstance(self._movement, Scattering)
        result: Fp8Tensor = self._cast(dy_TO.contiguous(), self._scales.scaling(GRADIENT), E5M2, alone)
        return result

    def prepare(self) -> None:
        """Cast the weight if it may have changed."""
        if self._step != self._casts.step:
            self._cast_weight()

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """``y = x W^T + bias``."""
        assert scale_inverse is not None
        check_rows(len(x_nI))
        self.prepare()
        bias_O = None if self._bias is None else self._bias.detach()
        multiply(x_nI, self._weight8, scale_inverse, self._weight_inverse, y_nO.dtype, bias_O, out=y_nO)

    def towards_input(self) -> RowProduct:
        """``dx = dy W``; the weight is transposed once for all rows."""
        weight_IO = self._weight8_IO

        def product(dy_nO: Tensor, scale_inverse: Tensor | None, dx_nI: Tensor) -> None:
            nonlocal weight_IO
            assert scale_inverse is not None
            if weight_IO is None:  # not before: tokens may be on their way to the product meanwhile
                weight_IO = self._turned(self._weight8, "turned weight")
            multiply(dy_nO, weight_IO, scale_inverse, self._weight_inverse, dx_nI.dtype, out=dx_nI)

        return product

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Zeros leave no scale for the next use, and are cast with 1, which would be the coarsest of all ranks'."""
        return torch.where(self._scales.scales[role] > 0, scale_inverse, 0.0)

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """``W.grad += dy^T x``."""
        dy_OT, dy_inverse = self._along_tokens(dy_TO, "turned gradient")
        x_IT, x_inverse = self._along_tokens(x_TI, "turned input")
        room = functools.partial(self._scratch.slot, "weight gradient")
        self._accumulate(dy_OT, x_IT, dy_inverse, x_inverse, main_gradient(self.weight), room)
        finish(self.weight)

    def _begin_evaluation(self) -> None:
        """Cast the weight for all passes of an evaluation; scales that move there begin unknown."""
        if self._own_eval_scales:
            self._scales.scales.zero_()
        self._cast_weight()

    def _own(self) -> LocalProduct:
        return self

    def _cast_weight(self) -> None:
        inference = self._casts.inference
        scaling = self._inference_weight_scaling() if inference else self._scales.scaling(WEIGHT)
        cast: Fp8Tensor = self._cast(self.weight.detach(), scaling, E4M3, False, inference)
        self._weight8.copy_(cast.data)
        self._weight_inverse.copy_(cast.scale_inverse)
        if self._weight8_IO is not None and not inference:
            self._transpose(self._weight8, self._weight8_IO)
        self._step = self._casts.step

    def _inference_weight_scaling(self) -> Scaling:
        """The scale of the weight; where none is known that of its maximum, which a sample might miss by far."""
        known, pending = self._scales.scaling(WEIGHT)
        largest = torch.linalg.vector_norm(self.weight.detach(), float("inf"), dtype=torch.float32)
        of_maximum = scale_of(largest, torch.finfo(E4M3).max, otherwise=torch.ones_like(largest))
        return Scaling(torch.where(known > 0, known, of_maximum), pending)

    def _along_tokens(self, rows: Operand | GatheredFp8, slot: str) -> tuple[Tensor, Tensor]:
        """The transpose, and the inverse of its one scale."""
        if isinstance(rows, GatheredFp8):
            inverse = rows.scale_inverses.amax().clamp(min=torch.finfo(torch.float32).tiny)
            return self._turned(rows.data, slot, rows.scale_inverses / inverse), inverse
        assert isinstance(rows, Fp8Tensor)
        turned = self._turned(rows.data, slot) if rows.transposed is None else rows.transposed
        return turned, rows.scale_inverse

    def _turned(self, matrix_NK: Tensor, slot: str, factors_R: Tensor | None = None) -> Tensor:
        room = self._scratch.slot(slot, matrix_NK.shape[::-1], matrix_NK.dtype)
        transposed: Tensor = self._transpose(matrix_NK, room, factors_R)
        return transposed


@dataclass(frozen=True)
class Shared:
    """What the products of all layers have in common.

    Attributes:
        scratch: memory for tensors that are needed only during one product.
        casts: when weights are cast.
        parallel: the ranks that share each layer.
        tokens: how tokens move during products; None for separate collectives.
        accumulation: how weights' gradients in FP8 are added to the main ones, see :class:`Fp8TrainedProduct`.
        own_eval_scales: see :class:`Fp8TrainedProduct`.
    """

    scratch: Scratch
    casts: WeightCasts
    parallel: TensorParallel = field(default_factory=TensorParallel)
    tokens: TokenProducts | None = None
    accumulation: str = AUTO
    own_eval_scales: bool = False

    def begin(self, inference: bool) -> None:
        """Before the first product of a forward pass, without gradients if it is of an ``inference``. Collective."""
        self.casts.begin(inference)
        self.begin_backward()

    def begin_backward(self) -> None:
        """Before the first product of a backward pass that may follow on any other pass. Collective."""
        if self.tokens is not None:
            self.tokens.begin()


def trained_product(
    layer: Any, linear: str, shared: Shared, bias: bool = False, keep_turned: bool = False
) -> HalfTrainedProduct | Fp8TrainedProduct:
    """The product of a layer with a weight, whose scales become a part of it.

    Args:
        layer: has ``weight``; where ranks share it a column- or row-parallel one.
        linear: ``torch`` or ``fp8``.
        shared: see there.
        bias: the product adds the layer's. A row-parallel one must not: every rank would.
        keep_turned: see :class:`Fp8TrainedProduct`; in 16 bits nothing is transposed.

    Raises:
        ValueError: such a bias.
        UnsupportedImplementation: FP8 cannot multiply such a weight.
    """
    movement = movement_of(layer, shared.parallel, shared.tokens)
    if bias and isinstance(movement, Scattering):
        raise ValueError("the bias of a row-parallel product belongs to the sum over the ranks: add it behind")
    added: nn.Parameter | None = layer.bias if bias else None
    if linear == "torch":
        return HalfTrainedProduct(layer.weight, added, movement)
    layer.fp8 = Scales(3, layer.weight.device)
    return Fp8TrainedProduct(
        layer.weight, layer.fp8, shared.scratch, shared.casts, added, movement, shared.accumulation, keep_turned,
        shared.own_eval_scales,
    )  # fmt: skip
