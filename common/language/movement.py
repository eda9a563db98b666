"""Transfers of a product's tokens between the ranks that share it, forward and backward.

Norms and residuals process a rank's own tokens (:mod:`common.distributed.tensor_parallel`). A column-parallel product
gathers its input, a row-parallel product scatters its result, and the gradients move in the opposite direction. FP8
rows are sent as FP8, with one scale per rank. The gathered input is not kept: the backward pass gathers it again
during the input gradient's product. The scatter of the input gradient overlaps with the weight gradient's product.

Legend: T tokens, s = T / ranks tokens of one rank, n any rows, I input features, O output features, o output features
of one rank (column-parallel), i input features of one rank (row-parallel), K features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from common.distributed.tensor_parallel.ranks import (
    SCALE_STRIDE,
    CollectiveProducts,
    RowProduct,
    TensorParallel,
    TokenProducts,
)
from common.ops.fp8_cast.reference import Fp8Tensor
from common.ops.linear.fp8 import GRADIENT, INPUT

Operand = Tensor | Fp8Tensor
"""Operand of a product: in 16 or more bits, or in FP8 with its scale."""


def data_and_scale(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """Return the data and its inverse scale, which is None unless ``operand`` is in FP8."""
    return (operand.data, operand.scale_inverse) if isinstance(operand, Fp8Tensor) else (operand, None)


def in_fp8(operand: Operand) -> tuple[Tensor | None, Tensor | None]:
    """Return data and inverse scale of an operand in FP8, to be saved; None and None for other operands."""
    return (operand.data, operand.scale_inverse) if isinstance(operand, Fp8Tensor) else (None, None)


def from_saved(data: Tensor, scale_inverse: Tensor) -> Fp8Tensor:
    """Return the FP8 operand from what :func:`in_fp8` has returned."""
    return Fp8Tensor(data, None, scale_inverse, data)


@dataclass(frozen=True)
class GatheredFp8:
    """FP8 rows of all ranks, with one scale per rank.

    Attributes:
        data: (T, K).
        scale_inverses: fp32 (ranks,); 0 for a rank whose rows are zeros.
    """

    data: Tensor
    scale_inverses: Tensor


class LocalProduct(Protocol):
    """The part of a product that a rank computes by itself."""

    @property
    def weight(self) -> Tensor:
        """This rank's part of the weight (O, I)."""
        ...

    def new_rows(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised tensor (rows, columns) in the dtype of results."""
        ...

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T + bias``, as a :data:`common.distributed.tensor_parallel.ranks.RowProduct`."""
        ...

    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W`` for any rows. It is valid until the next product's call."""
        ...

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Return the inverse scale to send with this rank's FP8 rows; 0 if ``role`` has had only zeros so far."""
        ...

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Compute ``W.grad += dy^T x``. Call this once per backward pass."""
        ...


class Movement(Protocol):
    """Transfers of a product's tokens between the ranks that share it."""

    def result_rows(self, rows: int) -> int:
        """Return the number of rows of the result, given the number of rows of the input."""
        ...

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        """Write the product into ``y``. Collective."""
        ...

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main gradient and return the input's gradient. Collective."""
        ...

    def input_gradient(self, own: LocalProduct, dy: Operand, dx: Tensor | None) -> Tensor:
        """Return only the input's gradient, in ``dx`` if it is given. Collective."""
        ...


class Staying(Movement):
    """Movement of a rank that has the whole product: no transfers."""

    def result_rows(self, rows: int) -> int:
        """Return ``rows``."""
        return rows

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        own.forward_rows(*data_and_scale(x), y)

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        own.add_weight_gradient(dy, x)
        return self.input_gradient(own, dy, None)

    def input_gradient(self, own: LocalProduct, dy: Operand, dx: Tensor | None) -> Tensor:
        dy_TO, scale_inverse = data_and_scale(dy)
        dx_TI = own.new_rows(len(dy_TO), own.weight.shape[1]) if dx is None else dx
        own.towards_input()(dy_TO, scale_inverse, dx_TI)
        return dx_TI


@dataclass(frozen=True)
class Gathering(Movement):
    """Movement of a column-parallel product: the input has this rank's tokens, the result has all tokens.

    Attributes:
        tokens: moves tokens during products.
    """

    parallel: TensorParallel
    tokens: TokenProducts

    def result_rows(self, rows: int) -> int:
        """Return the number of rows of all ranks."""
        return rows * self.parallel.size

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        self.tokens.gather_product(*data_and_scale(x), own.forward_rows, y)

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main gradient and return the input's gradient. Collective.

        x is gathered during the product for dx, and dx is scattered during the product for dW.
        """
        x_sI, x_scale = data_and_scale(x)
        arriving, scales = self.parallel.start_all_gather(x_sI), None
        if x_scale is not None:
            scales = self.parallel.start_all_gather(own.shared_scale(INPUT, x_scale).expand(1, SCALE_STRIDE))
        dy_To, dy_scale = data_and_scale(dy)
        dx_sI = own.new_rows(self.parallel.own_count(len(dy_To)), own.weight.shape[1])
        leaving = self.tokens.start_product_scatter(dy_To, dy_scale, own.towards_input(), dx_sI)
        x_TI = arriving.wait()
        own.add_weight_gradient(dy, x_TI if scales is None else GatheredFp8(x_TI, scales.wait()[:, 0]))
        return leaving.wait()

    def input_gradient(self, own: LocalProduct, dy: Operand, dx: Tensor | None) -> Tensor:
        dy_To, scale_inverse = data_and_scale(dy)
        dx_sI = own.new_rows(self.parallel.own_count(len(dy_To)), own.weight.shape[1]) if dx is None else dx
        self.tokens.product_scatter(dy_To, scale_inverse, own.towards_input(), dx_sI)
        return dx_sI


@dataclass(frozen=True)
class Scattering(Movement):
    """Movement of a row-parallel product: the input has all tokens, the summed result has this rank's tokens."""

    parallel: TensorParallel
    tokens: TokenProducts

    def result_rows(self, rows: int) -> int:
        """Return the number of this rank's rows."""
        return self.parallel.own_count(rows)

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        self.tokens.product_scatter(*data_and_scale(x), own.forward_rows, y)

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main one; return the input's. dy is gathered once for both. Collective."""
        dy_sO, dy_scale = data_and_scale(dy)
        ranks = self.parallel.size
        dx_Ti = own.new_rows(ranks * len(dy_sO), own.weight.shape[1])
        dy_TO = dy_sO.new_empty(ranks * len(dy_sO), dy_sO.shape[1])
        scales_R4 = None
        if dy_scale is not None:
            dy_scale, scales_R4 = own.shared_scale(GRADIENT, dy_scale), dy_scale.new_empty(ranks, SCALE_STRIDE)
        self.tokens.gather_product(dy_sO, dy_scale, own.towards_input(), dx_Ti, dy_TO, scales_R4)
        own.add_weight_gradient(dy_TO if scales_R4 is None else GatheredFp8(dy_TO, scales_R4[:, 0]), x)
        return dx_Ti

    def input_gradient(self, own: LocalProduct, dy: Operand, dx: Tensor | None) -> Tensor:
        dy_sO, scale_inverse = data_and_scale(dy)
        dx_Ti = own.new_rows(self.parallel.size * len(dy_sO), own.weight.shape[1]) if dx is None else dx
        self.tokens.gather_product(dy_sO, scale_inverse, own.towards_input(), dx_Ti)
        return dx_Ti


STAYING = Staying()


def movement_of(layer: Any, parallel: TensorParallel, tokens: TokenProducts | None) -> Movement:
    """Return the movement of a layer's product.

    Args:
        layer: layer with the weight of the product.
        parallel: ranks that share the product.
        tokens: moves tokens during products; None for separate collectives.

    Raises:
        TypeError: several ranks share layers, but this one is neither column- nor row-parallel.
    """
    if parallel.size == 1:
        return STAYING
    tokens = tokens or CollectiveProducts(parallel)
    if isinstance(layer, ColumnParallelLinear):
        return Gathering(parallel, tokens)
    if isinstance(layer, RowParallelLinear):
        return Scattering(parallel, tokens)
    raise TypeError(f"{type(layer).__name__}: {parallel.size} ranks share column- and row-parallel layers only")
