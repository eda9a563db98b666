"""How the tokens of a trained product move between the ranks that share it, forward and backward.

Where ranks share a layer, norms and residuals are of a rank's own tokens (:mod:`common.distributed.tensor_parallel`).
A column-parallel product gathers its input, a row-parallel one scatters its result, and the gradients go the other way.
Rows in FP8 travel as they are, with their rank's scale. The gathered input is not kept: the backward pass gathers it
again, beneath the input gradient's product, whose scatter in turn is beneath the weight gradient's.

Legend: T tokens, s = T / ranks those of one rank, n any rows, I input features, O output features, of column-parallel
products o and of row-parallel ones i of one rank; K features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from common.distributed.tensor_parallel.products import SCALE_STRIDE, CollectiveProducts, RowProduct, TokenProducts
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.nn.frozen_decoder.products import Operand, data_and_scale
from common.ops.linear.fp8 import GRADIENT, INPUT


@dataclass(frozen=True)
class GatheredFp8:
    """Rows of all ranks in FP8, each rank's with a scale of its own.

    Attributes:
        data: (T, K).
        scale_inverses: fp32 (ranks,); 0 where the rows are zeros.
    """

    data: Tensor
    scale_inverses: Tensor


class LocalProduct(Protocol):
    """What a rank multiplies by itself."""

    @property
    def weight(self) -> nn.Parameter:
        """(O, I), of this rank."""
        ...

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """``y = x W^T + bias`` of any rows, as :data:`common.distributed.tensor_parallel.products.RowProduct`."""
        ...

    def towards_input(self) -> RowProduct:
        """``dx = dy W`` of any rows; it holds until the next product's."""
        ...

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """The inverse scale of own rows in FP8 as others take it: 0 where ``role`` has been nothing but zeros."""
        ...

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """``W.grad += dy^T x``, once in each backward pass."""
        ...


class Movement(Protocol):
    """How the tokens of a product move between the ranks that share it."""

    def result_rows(self, rows: int) -> int:
        """Rows of the result for so many rows of the input."""
        ...

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        """The product into ``y``. Collective."""
        ...

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """Add the weight's gradient to the main one; the input's. Collective."""
        ...


class Staying:
    """A rank that has the whole product moves nothing."""

    def result_rows(self, rows: int) -> int:
        """As many."""
        return rows

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        """See :class:`Movement`."""
        own.forward_rows(*data_and_scale(x), y)

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """See :class:`Movement`."""
        own.add_weight_gradient(dy, x)
        dy_TO, scale_inverse = data_and_scale(dy)
        dx_TI = own.weight.new_empty(len(dy_TO), own.weight.shape[1])
        own.towards_input()(dy_TO, scale_inverse, dx_TI)
        return dx_TI


@dataclass(frozen=True)
class Gathering:
    """Of a column-parallel product: own tokens come in, all of them go out.

    Attributes:
        parallel: the ranks.
        tokens: how tokens move beside products.
    """

    parallel: TensorParallel
    tokens: TokenProducts

    def result_rows(self, rows: int) -> int:
        """All ranks' rows."""
        return rows * self.parallel.size

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        """See :class:`Movement`."""
        self.tokens.gather_product(*data_and_scale(x), own.forward_rows, y)

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """See :class:`Movement`: x comes beneath the input gradient's product, dx leaves beneath the weight's."""
        x_sI, x_scale = data_and_scale(x)
        arriving, scales = self.parallel.start_all_gather(x_sI), None
        if x_scale is not None:
            scales = self.parallel.start_all_gather(own.shared_scale(INPUT, x_scale).expand(1, SCALE_STRIDE))
        dy_To, dy_scale = data_and_scale(dy)
        dx_sI = own.weight.new_empty(self.parallel.own_count(len(dy_To)), own.weight.shape[1])
        leaving = self.tokens.start_product_scatter(dy_To, dy_scale, own.towards_input(), dx_sI)
        x_TI = arriving.wait()
        own.add_weight_gradient(dy, x_TI if scales is None else GatheredFp8(x_TI, scales.wait()[:, 0]))
        return leaving.wait()


@dataclass(frozen=True)
class Scattering:
    """Of a row-parallel product: all tokens come in, own ones of the sum go out.

    Attributes:
        parallel, tokens: see :class:`Gathering`.
    """

    parallel: TensorParallel
    tokens: TokenProducts

    def result_rows(self, rows: int) -> int:
        """This rank's rows."""
        return self.parallel.own_count(rows)

    def multiply(self, own: LocalProduct, x: Operand, y: Tensor) -> None:
        """See :class:`Movement`."""
        self.tokens.product_scatter(*data_and_scale(x), own.forward_rows, y)

    def backward(self, own: LocalProduct, dy: Operand, x: Operand) -> Tensor:
        """See :class:`Movement`: what is gathered for the input's gradient serves the weight's as well."""
        dy_sO, dy_scale = data_and_scale(dy)
        ranks, weight = self.parallel.size, own.weight
        dx_Ti = weight.new_empty(ranks * len(dy_sO), weight.shape[1])
        dy_TO = dy_sO.new_empty(ranks * len(dy_sO), dy_sO.shape[1])
        scales_R4 = None
        if dy_scale is not None:
            dy_scale, scales_R4 = own.shared_scale(GRADIENT, dy_scale), dy_scale.new_empty(ranks, SCALE_STRIDE)
        self.tokens.gather_product(dy_sO, dy_scale, own.towards_input(), dx_Ti, dy_TO, scales_R4)
        own.add_weight_gradient(dy_TO if scales_R4 is None else GatheredFp8(dy_TO, scales_R4[:, 0]), x)
        return dx_Ti


STAYING = Staying()


def movement_of(layer: Any, parallel: TensorParallel, tokens: TokenProducts | None) -> Movement:
    """How the tokens of a layer's product move.

    Args:
        layer: whose product it is.
        parallel: the ranks that share it.
        tokens: how tokens move beside products; None for collectives.

    Raises:
        TypeError: ranks share layers, and this one doesn't say how.
    """
    if parallel.size == 1:
        return STAYING
    tokens = tokens or CollectiveProducts(parallel)
    if isinstance(layer, ColumnParallelLinear):
        return Gathering(parallel, tokens)
    if isinstance(layer, RowParallelLinear):
        return Scattering(parallel, tokens)
    raise TypeError(f"{type(layer).__name__}: {parallel.size} ranks share column- and row-parallel layers only")
