"""Products with a trained weight: forward, input gradient, and weight gradient, which is added to the main gradient.

In FP8, a weight is cast to e4m3 in the first forward pass of a step and kept for all micro-batches (:mod:`.casts`).
Activations are in e4m3, gradients in e5m2, with delayed scales (:mod:`common.ops.fp8_cast`). Without gradients
(``inference``), for example in an evaluation, casts use the scales of the next training step and do not change them.
While a scale is unknown, a weight uses its own maximum, and an input the maximum of a sample of its rows.

Under tensor parallelism, tokens move between ranks (:mod:`.movement`).

Legend: T tokens, n any rows, I input features, O output features of this rank; K summed dimension, N columns of a
result.
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
    """A product with a trained weight. Its operands are cast by itself, or by their producers with its scales.

    For a column-parallel product, the input and its gradient have this rank's tokens; for a row-parallel product, the
    result and its gradient do. Row counts below refer to these.
    """

    @property
    def weight(self) -> nn.Parameter:
        """This rank's part of the weight (O, I)."""
        ...

    def input_scaling(self) -> Scaling | None:
        """Return the state of the input's scale for a producer that casts; None if the product needs no cast."""
        ...

    def frozen(self, inference: bool) -> bool:
        """Return whether the operation that casts the input leaves its scale unchanged.

        ``inference``: whether no gradients are needed.
        """
        ...

    def gradient_scaling(self) -> Scaling | None:
        """Return the state of the scale of the result's gradient, or None, as in :meth:`input_scaling`."""
        ...

    def cast_input(self, x_TI: Tensor, inference: bool) -> Operand:
        """Cast an input that its producer has not cast."""
        ...

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """Return the scale of an earlier cast, to recompute the input without updating it; None if nothing is cast."""
        ...

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Operand:
        """Cast the input with the scale of an earlier cast, for the backward pass."""
        ...

    def cast_gradient(self, dy_TO: Tensor) -> Operand:
        """Cast a gradient of the result that its producer has not cast."""
        ...

    def prepare(self) -> None:
        """Cast the weight now, if the next forward pass would. Within :meth:`WeightCasts.once`, that pass skips it."""
        ...

    def result_rows(self, rows: int) -> int:
        """Return the number of rows of the result, given the number of rows of the input."""
        ...

    def multiply(self, x: Operand, y: Tensor | None = None) -> Tensor:
        """Return ``y = x W^T``, plus the bias if there is one. ``y`` is an optional buffer for it. Collective."""
        ...

    def backward(self, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main gradient and return the input's gradient. Collective.

        Call this once per backward pass.
        """
        ...


class _Moving(ABC):
    """Base of the products: multiplies while a :class:`Movement` transfers tokens."""

    weight: nn.Parameter
    _movement: Movement

    def result_rows(self, rows: int) -> int:
        """Return the number of rows of the result, given the number of rows of the input."""
        return self._movement.result_rows(rows)

    def multiply(self, x: Operand, y: Tensor | None = None) -> Tensor:
        """Return ``y = x W^T``, plus the bias."""
        rows, columns = self.result_rows(len(data_and_scale(x)[0])), len(self.weight)
        y = self.weight.new_empty(rows, columns) if y is None else y
        self._movement.multiply(self._own(), x, y)
        return y

    def backward(self, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main gradient and return the input's gradient."""
        return self._movement.backward(self._own(), dy, x)

    @abstractmethod
    def _own(self) -> LocalProduct:
        """Return the part of the product that this rank computes by itself."""


class HalfTrainedProduct(_Moving):
    """The product in the dtype of the weight.

    Args:
        bias_O: added to the result. The caller computes its gradient.
        movement: moves tokens between the ranks that share the product.
    """

    def __init__(
        self, weight_OI: nn.Parameter, bias_O: nn.Parameter | None = None, movement: Movement = STAYING
    ) -> None:
        self.weight, self._bias, self._movement = weight_OI, bias_O, movement

    def input_scaling(self) -> None:
        """Return None: this product needs no cast."""

    def frozen(self, inference: bool) -> bool:
        """Return True: there is no scale."""
        return True

    def gradient_scaling(self) -> None:
        """Return None: the gradients need no cast."""

    def cast_input(self, x_TI: Tensor, inference: bool) -> Tensor:
        """Return the input unchanged."""
        return x_TI

    def scaling_of(self, scale_inverse: Tensor | None) -> None:
        """Return None: this product needs no cast."""

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Tensor:
        """Return the input unchanged."""
        return x_TI

    def cast_gradient(self, dy_TO: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return dy_TO

    def prepare(self) -> None:
        """Do nothing: the weight is not cast."""

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T + bias``."""
        weight_IO = self.weight.detach().t()
        if self._bias is None:
            torch.mm(x_nI, weight_IO, out=y_nO)
        else:  # cuBLAS adds the bias in the epilogue of the product
            torch.addmm(self._bias.detach(), x_nI, weight_IO, out=y_nO)

    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W``."""
        return times(self.weight.detach())

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Raise a TypeError: rows of this product have no scale."""
        raise TypeError("a product in the dtype of its weight has no scales")

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Compute ``W.grad += dy^T x``."""
        assert isinstance(dy_TO, Tensor)
        assert isinstance(x_TI, Tensor)
        add_product_(main_gradient(self.weight), dy_TO, x_TI)
        finish(self.weight)

    def _own(self) -> LocalProduct:
        return self


class Fp8TrainedProduct(_Moving):
    """The product in FP8.

    Args:
        weight_OI: parameter in the dtype of the activations.
        scales: scales of input, weight and gradient.
        scratch: buffers that all layers share.
        casts: decides when the weight is cast.
        bias_O: added to the result. The caller computes its gradient.
        movement: moves tokens between the ranks that share the product.
        accumulation: how the weight's gradient is added, an implementation of :mod:`common.ops.weight_gradient`.
        keep_turned: whether to keep the transpose of the cast weight for the step.
        own_eval_scales: whether an evaluation starts with unknown scales and updates them, on ranks that do not
            train. Otherwise, it uses the scales of training and does not change them.

    Raises:
        UnsupportedImplementation: O or I is not a multiple of 16, or ``accumulation`` does not run here.
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
        # Allocated here, so that CUDA graphs keep the address. Keeping the transpose costs 1 byte per weight. For the
        # layers of GPT-3 over four ranks, whose weights have 1.3 times as many elements as a micro-batch's operands, it
        # saves 0.2 of about 10 ms per use.
        self._weight8 = torch.empty(weight_OI.shape, dtype=E4M3, device=device)
        self._weight8_IO = self._weight8.new_empty(weight_OI.shape[::-1]) if keep_turned else None
        self._weight_inverse = torch.ones((), dtype=torch.float32, device=device)
        self._step = -1

    def input_scaling(self) -> Scaling:
        """Return the state of the input's scale."""
        return self._scales.scaling(INPUT)

    def frozen(self, inference: bool) -> bool:
        """Return whether the input's scale stays unchanged."""
        return inference and not self._own_eval_scales

    def gradient_scaling(self) -> Scaling | None:
        """Return the state of the scale of the result's gradient."""
        return self._scales.scaling(GRADIENT)

    def cast_input(self, x_TI: Tensor, inference: bool) -> Fp8Tensor:
        """Cast the input to e4m3."""
        result: Fp8Tensor = self._cast(x_TI, self.input_scaling(), E4M3, False, self.frozen(inference))
        return result

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """Return the scale of an earlier cast."""
        assert scale_inverse is not None
        return Scaling(scale_inverse.reciprocal(), self._scales.pending[INPUT])

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """Cast the input to e4m3 with the scale of an earlier cast; also transpose it if no gathering follows."""
        alone = not isinstance(self._movement, Gathering)
        result: Fp8Tensor = self._cast(x_TI, self.scaling_of(scale_inverse), E4M3, alone, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """Cast the gradient to e5m2; also transpose it if no gathering follows."""
        alone = not isinstance(self._movement, Scattering)
        result: Fp8Tensor = self._cast(dy_TO.contiguous(), self._scales.scaling(GRADIENT), E5M2, alone)
        return result

    def prepare(self) -> None:
        """Cast the weight if it may have changed."""
        if self._step != self._casts.step:
            self._cast_weight()

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T + bias``."""
        assert scale_inverse is not None
        check_rows(len(x_nI))
        self.prepare()
        bias_O = None if self._bias is None else self._bias.detach()
        multiply(x_nI, self._weight8, scale_inverse, self._weight_inverse, y_nO.dtype, bias_O, out=y_nO)

    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W``. The weight is transposed once for all calls."""
        weight_IO = self._weight8_IO

        def product(dy_nO: Tensor, scale_inverse: Tensor | None, dx_nI: Tensor) -> None:
            nonlocal weight_IO
            assert scale_inverse is not None
            if weight_IO is None:  # lazy, so that it overlaps with the transfer of tokens
                weight_IO = self._turned(self._weight8, "turned weight")
            multiply(dy_nO, weight_IO, scale_inverse, self._weight_inverse, dx_nI.dtype, out=dx_nI)

        return product

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Return the inverse scale to send with this rank's FP8 rows; 0 if ``role`` has had only zeros so far.

        Zeros leave the scale unknown and are cast with 1, which would otherwise be the coarsest scale of all ranks.
        """
        return torch.where(self._scales.scales[role] > 0, scale_inverse, 0.0)

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Compute ``W.grad += dy^T x``."""
        dy_OT, dy_inverse = self._along_tokens(dy_TO, "turned gradient")
        x_IT, x_inverse = self._along_tokens(x_TI, "turned input")
        room = functools.partial(self._scratch.slot, "weight gradient")
        self._accumulate(dy_OT, x_IT, dy_inverse, x_inverse, main_gradient(self.weight), room)
        finish(self.weight)

    def _begin_evaluation(self) -> None:
        """Cast the weight for all passes of an evaluation. With ``own_eval_scales``, reset the scales first."""
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
        """Return the scale of the weight, or that of its exact maximum if it is unknown.

        The maximum of a sample may be far too small.
        """
        known, pending = self._scales.scaling(WEIGHT)
        largest = torch.linalg.vector_norm(self.weight.detach(), float("inf"), dtype=torch.float32)
        of_maximum = scale_of(largest, torch.finfo(E4M3).max, otherwise=torch.ones_like(largest))
        return Scaling(torch.where(known > 0, known, of_maximum), pending)

    def _along_tokens(self, rows: Operand | GatheredFp8, slot: str) -> tuple[Tensor, Tensor]:
        """Return the transpose of ``rows``, and its single inverse scale."""
        if isinstance(rows, GatheredFp8):
            # The product needs one scale: rows of ranks with a larger scale are rounded again by the transpose.
            inverse = rows.scale_inverses.amax().clamp(min=torch.finfo(torch.float32).tiny)
            return self._turned(rows.data, slot, rows.scale_inverses / inverse), inverse
        assert isinstance(rows, Fp8Tensor)
        turned = self._turned(rows.data, slot) if rows.transposed is None else rows.transposed
        return turned, rows.scale_inverse

    def _turned(self, matrix_NK: Tensor, slot: str, factors_R: Tensor | None = None) -> Tensor:
        # A Hopper GPU multiplies FP8 only if both operands are contiguous along the summed dimension. These transposes
        # move 2 bytes per element: for Llama 3.1 8B and a row of 8,192 tokens 50 GB, about 2.5 % of the time. Producers
        # that write both orders would save 1 of the 2 bytes, but need kernels that hold tiles instead of rows.
        room = self._scratch.slot(slot, matrix_NK.shape[::-1], matrix_NK.dtype)
        transposed: Tensor = self._transpose(matrix_NK, room, factors_R)
        return transposed


@dataclass(frozen=True)
class Shared:
    """Settings and buffers that the products of all layers share.

    Attributes:
        scratch: memory for tensors that are needed only during one product.
        casts: decides when weights are cast.
        parallel: ranks that share each layer.
        tokens: moves tokens during products; None for separate collectives.
        accumulation: how FP8 weight gradients are added to the main gradients, see :class:`Fp8TrainedProduct`.
        own_eval_scales: see :class:`Fp8TrainedProduct`.
    """

    scratch: Scratch
    casts: WeightCasts
    parallel: TensorParallel = field(default_factory=TensorParallel)
    tokens: TokenProducts | None = None
    accumulation: str = AUTO
    own_eval_scales: bool = False

    def begin(self, inference: bool) -> None:
        """Call this before the first product of a forward pass. Collective.

        ``inference``: whether the pass needs no gradients.
        """
        self.casts.begin(inference)
        self.begin_backward()

    def begin_backward(self) -> None:
        """Call this before a backward pass that does not directly follow its forward pass. Collective."""
        if self.tokens is not None:
            self.tokens.begin()


def trained_product(
    layer: Any, linear: str, shared: Shared, bias: bool = False, keep_turned: bool = False
) -> HalfTrainedProduct | Fp8TrainedProduct:
    """Return the product for a layer's weight. In FP8, register its scales in the layer.

    Args:
        layer: module with ``weight``; column- or row-parallel if ranks share it.
        linear: ``torch`` or ``fp8``.
        bias: whether the product adds the layer's bias. Not for a row-parallel layer, where every rank would add it.
        keep_turned: see :class:`Fp8TrainedProduct`; ignored for ``torch``.

    Raises:
        ValueError: ``bias`` is set for a row-parallel layer.
        UnsupportedImplementation: FP8 cannot multiply this weight.
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
