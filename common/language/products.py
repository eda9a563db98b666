"""Linear layers of the blocks: forward product, input gradient and, if the weight is trained, weight gradient.

A product is in the dtype of its weight (:class:`HalfProduct`) or in FP8 (:mod:`common.language.fp8_products`). The
gradient of a trained weight is added to its main gradient. :mod:`common.language.lora` adds a low-rank adapter.

Under tensor parallelism, tokens move between ranks during the product (:mod:`common.language.movement`): for a
column-parallel product, the input and its gradient have this rank's tokens; for a row-parallel product, the result and
its gradient do.

Legend: T tokens, n any rows, I input features, O output features of this rank; K summed dimension, N columns of a
result.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.ranks import RowProduct, TensorParallel, TokenProducts, Underway, times
from common.language.architecture import Tokens
from common.language.lora import ProductAdapter
from common.language.movement import GatheredFp8, Movement, Operand, data_and_scale
from common.nn.main_gradient import finish, main_gradient
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling
from common.ops.operation import AUTO
from common.ops.row_norm import RowNorm
from common.ops.weight_gradient import add_product_


class Scratch:
    """Buffers that all layers reuse for large temporaries.

    With the caching allocator instead, activations that a layer keeps could be placed inside the freed block, and the
    next layer would need a second block of the same size. A buffer grows when a larger size is requested and then
    moves to another address. Therefore, request the largest size before a CUDA graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Tensor] = {}

    def mlp(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer for a tensor as wide as the MLP. Its values are valid until the next call."""
        return self.slot("mlp", shape, dtype)

    def slot(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer ``name``. Its values are valid until the next call with the same name."""
        needed = math.prod(shape) * dtype.itemsize
        if name not in self._slots or self._slots[name].numel() < needed:
            self._slots.pop(name, None)
            self._slots[name] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._slots[name][:needed].view(dtype).view(shape)


class Scales(nn.Module):
    """Delayed scales of several tensors. They are saved in checkpoints and restored after warm-up.

    Attributes:
        scales: fp32 (count,), scale of the next use of each tensor; 0 before the first use.
        pending: int32 (count, 2), scratch of the casts, zeros between casts.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scales", torch.zeros(count, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(count, 2, dtype=torch.int32, device=device), persistent=False)

    def scaling(self, role: int) -> Scaling:
        """Return the state of the scale with index ``role``."""
        return Scaling(self.scales[role], self.pending[role])


class WeightCasts:
    """Schedule of the weight casts of FP8 products.

    By default, products cast in every forward pass, within ``once()`` only in the first one, and for ``evaluating()``
    before any forward pass.

    Attributes:
        step: incremented whenever weights may have changed. A product casts its weight if it last did so at another
            step.
        inference: whether the passes need no gradients, so that casts do not update the scales of weights.
    """

    def __init__(self) -> None:
        self.step = 0
        self.inference = False
        self._once = False
        self._in_evaluations: list[Callable[[], None]] = []

    def before_evaluations(self, cast: Callable[[], None]) -> None:
        """Register a function that casts a product's weight before each evaluation."""
        self._in_evaluations.append(cast)

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Within this context, no weight changes. The host decides: a captured step casts in its first micro-batch.

        After the context, even if it failed, each pass casts again.
        """
        self.step += 1
        self.inference = False  # for casts before the first pass begins
        self._once = True
        try:
            yield
        finally:
            self._once = False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context, no weight changes and no gradients are needed. Entering it casts all weights.

        CUDA graphs of passes may be captured and replayed within it, and replayed within a later such context.
        """
        with self.once():
            self.inference = True
            for cast in self._in_evaluations:
                cast()
            yield

    def begin(self, inference: bool) -> None:
        """Begin a forward pass. ``inference``: whether it needs no gradients."""
        self.inference = inference
        if not self._once:
            self.step += 1


class ProductBackward(NamedTuple):
    """Result of the backward pass of a product.

    Attributes:
        dx: gradient of the input; None if it is not needed.
        du, db: gradients of u and of B of the adapter; None without one.
    """

    dx: Tensor | None
    du: Tensor | None = None
    db: Tensor | None = None


class Product(ABC):
    """A product with a weight. Its operands are cast by itself, or by their producers with its scales.

    Args:
        weight_OI: this rank's part of the weight.
        movement: moves tokens between the ranks that share the product.
        bias_O: added to the result. The caller computes its gradient.

    Attributes:
        adapter: low-rank adapter; None without one.
    """

    adapter: ProductAdapter | None = None

    def __init__(self, weight_OI: Tensor, movement: Movement, bias_O: nn.Parameter | None = None) -> None:
        self.weight, self.movement, self.bias = weight_OI, movement, bias_O
        self.trained = weight_OI.requires_grad

    def input_scaling(self) -> Scaling | None:
        """Return the state of the input's scale for a producer that casts. Here: None, the producer must not cast."""
        return None

    def gradient_scaling(self) -> Scaling | None:
        """Return the state of the scale of the result's gradient. Here: None, as in :meth:`input_scaling`."""
        return None

    @property
    def needs_half(self) -> bool:
        """Whether producers of the input must return it in 16 or more bits, beside FP8 or instead of it."""
        return self.adapter is not None or self.input_scaling() is None

    @property
    def half_gradient(self) -> bool:
        """Whether producers of the result's gradient must return it in 16 or more bits, as in :attr:`needs_half`."""
        return self.adapter is not None or self.gradient_scaling() is None

    @property
    def adapters(self) -> tuple[nn.Parameter, ...]:
        """Parameters A and B of the adapter; empty without one."""
        return () if self.adapter is None else (self.adapter.a, self.adapter.b)

    def frozen(self, inference: bool) -> bool:
        """Return whether the operation that casts the input leaves its scale unchanged. Here: True, nothing is cast.

        ``inference``: whether no gradients are needed.
        """
        return True

    def cast_input(self, x_TI: Tensor, inference: bool) -> Operand:
        """Return the input (T, I) as the product reads it: unchanged here, in FP8 in subclasses for FP8."""
        return x_TI

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """Return the scale of an earlier cast, to recompute the input without updating it. Here: None, no cast."""
        return None

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Operand:
        """Return the input (T, I) for the backward pass: unchanged here, in FP8 products cast with an earlier scale."""
        return x_TI

    def cast_gradient(self, dy_TO: Tensor) -> Operand:
        """Return a gradient (T, O) that its producer has not cast: unchanged here, in FP8 in subclasses for FP8."""
        return dy_TO

    def prepare(self) -> None:
        """Cast the weight now, so that the next pass in :meth:`WeightCasts.once` does not. Here: do nothing."""

    def result_rows(self, rows: int) -> int:
        """Return the number of rows of the result, given the number of rows of the input."""
        return self.movement.result_rows(rows)

    def new_rows(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised tensor (rows, columns) in the dtype of results."""
        return self.weight.new_empty(rows, columns)

    def start_adapter(self, x: Tensor | None, tokens: Tokens) -> Underway | None:
        """Start to compute u of the adapter from the input in 16 or more bits; None without an adapter. Collective."""
        if self.adapter is None:
            return None
        assert x is not None
        return self.adapter.start_forward(x, tokens)

    def operand(self, x: Tensor | None, x8: Fp8Tensor | None, inference: bool) -> Operand:
        """Return the input as the product reads it: ``x8`` if its producer has cast it, else ``x``, cast if needed."""
        if x8 is not None:
            return x8
        assert x is not None
        return self.cast_input(x, inference)

    def forward(
        self, x: Operand, underway: Underway | None = None, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the product with the adapter, and u of the adapter for the backward pass. Collective.

        The caller releases other copies of the input before, so that the result can take their memory.

        Args:
            x: result of :meth:`operand`.
            underway: result of :meth:`start_adapter`.
            y: buffer for the product; None to allocate one.
        """
        y = self.multiply(x, y)
        if self.adapter is None or underway is None:
            return y, None
        u = underway.wait()
        self.adapter.add(y, u)
        return y, u

    def multiply(self, x: Operand, y: Tensor | None = None) -> Tensor:
        """Return ``y = x W^T``, plus the bias, without the adapter. ``y`` is an optional buffer for it. Collective."""
        rows = self.result_rows(len(data_and_scale(x)[0]))
        y = self.new_rows(rows, len(self.weight)) if y is None else y
        self.movement.multiply(self, x, y)
        return y

    def backward(
        self,
        dy: Tensor | None,
        dy8: Fp8Tensor | None,
        x: Operand | None,
        tokens: Tokens,
        u: Tensor | None = None,
        *,
        needed: bool = True,
        dx: Tensor | None = None,
    ) -> ProductBackward:
        """Add the gradient of a trained weight to the main gradient, and return the input's gradient. Collective.

        Call this once per backward pass.

        Args:
            dy, dy8: gradient of the result in 16 or more bits, see :attr:`half_gradient`, and in FP8; one may be None.
            x: the input as the product read it; None if the weight is frozen.
            needed: whether the input needs a gradient.
            dx: buffer for the input's gradient, if the weight is frozen.
        """
        if self.adapter is None:
            return ProductBackward(self._input_gradient(dy, dy8, x, dx) if needed or self.trained else None)
        assert dy is not None
        assert u is not None
        underway, db = self.adapter.start_backward(dy, u)
        found = self._input_gradient(dy, dy8, x, dx) if needed or self.trained else None
        du = underway.wait()
        if found is not None:
            self.adapter.add_input_gradient(found, du, tokens)
        return ProductBackward(found, du, db)

    def masked(self, x: Tensor, tokens: Tokens) -> Tensor | None:
        """Return the input of the adapter, given that of the product; None without an adapter."""
        return None if self.adapter is None else self.adapter.input(x, tokens)

    def masked_again(self, norm: RowNorm, normed: tuple[Tensor, Tensor, Tensor], tokens: Tokens) -> Tensor | None:
        """Return the input of the adapter, given the norm that made it, and its residual, moments and weight."""
        return None if self.adapter is None else self.adapter.input_again(norm, normed, tokens)

    def adapter_gradients(self, found: ProductBackward, masked: Tensor | None) -> tuple[Tensor, ...]:
        """Return the gradients of :attr:`adapters`, given the adapter's input."""
        if masked is None or found.du is None or found.db is None:
            return ()
        return found.du.t() @ masked, found.db

    def _input_gradient(self, dy: Tensor | None, dy8: Fp8Tensor | None, x: Operand | None, dx: Tensor | None) -> Tensor:
        gradient: Operand | None = dy8
        if gradient is None:
            assert dy is not None
            gradient = self.cast_gradient(dy)
        if not self.trained:
            return self.movement.input_gradient(self, gradient, dx)
        assert x is not None
        return self.movement.backward(self, gradient, x)

    @abstractmethod
    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T + bias``, as a :data:`common.distributed.tensor_parallel.ranks.RowProduct`."""

    @abstractmethod
    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W`` for any rows. It is valid until the next product's call."""

    @abstractmethod
    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Return the inverse scale to send with this rank's FP8 rows; 0 if ``role`` has had only zeros so far."""

    @abstractmethod
    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Compute ``W.grad += dy^T x``. Call this once per backward pass."""


class HalfProduct(Product):
    """The product in the dtype of the weight, which is frozen or trained."""

    weight: nn.Parameter

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T + bias``."""
        weight_IO = self.weight.detach().t()
        if self.bias is None:
            torch.mm(x_nI, weight_IO, out=y_nO)
        else:  # cuBLAS adds the bias in the epilogue of the product
            torch.addmm(self.bias.detach(), x_nI, weight_IO, out=y_nO)

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


@dataclass(frozen=True)
class Shared:
    """Settings and buffers that the products of all layers share.

    Attributes:
        scratch: memory for tensors that are needed only during one product.
        casts: decides when trained weights are cast.
        tokens: moves tokens during products; None for separate collectives.
        accumulation: how gradients of trained FP8 products are added to the main gradients, an implementation of
            :mod:`common.ops.weight_gradient`.
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
