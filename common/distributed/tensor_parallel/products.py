"""Matrix products with token transfers: the two operations that every tensor-parallel layer consists of.

Column-parallel layers gather tokens before the forward product and scatter gradients after the backward product;
row-parallel layers do the reverse. One implementation of the two operations therefore serves all layers in both passes.
This module uses collectives; :mod:`common.distributed.tensor_parallel.overlap` overlaps transfer and product.

The caller supplies the product as a function of any number of rows. FP8 rows are transferred together with the inverse
of their scale: every rank casts its own tokens with its own scale, which halves the transferred bytes.

Shapes: T tokens, s = T / ranks tokens of one rank, n any number of tokens; K summed dimension, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.distributed.tensor_parallel.ranks import TensorParallel, Underway

RowProduct = Callable[[Tensor, Tensor | None, Tensor], object]
"""``product(x_nK, scale_inverse, y_nN)`` writes ``x W`` to y. ``scale_inverse``: 0-d fp32 for FP8 rows, else None."""


SCALE_STRIDE = 4
"""Elements between the scales of consecutive ranks in one tensor, because cuBLASLt requires 16-byte alignment."""


class TokenProducts(Protocol):
    """Products whose left operand or result is sharded over the ranks by tokens. Collective, without autograd."""

    name: str

    def begin(self) -> None:
        """Prepare for the first product of a forward pass, which may be captured and replayed."""
        ...

    def gather_product(
        self,
        x_sK: Tensor,
        scale_inverse: Tensor | None,
        product: RowProduct,
        y_TN: Tensor,
        x_TK: Tensor | None = None,
        scales_R4: Tensor | None = None,
    ) -> None:
        """Compute ``y = all_gather(x) W``.

        Args:
            x_sK: tokens of this rank, contiguous.
            scale_inverse: inverse scale of this rank's FP8 rows, 0-d fp32; None for other dtypes.
            product: see :data:`RowProduct`.
            y_TN: output of the product.
            x_TK: output for the gathered rows; None if the caller does not need them.
            scales_R4: output for the inverse scales of FP8 rows, fp32 (ranks, ``SCALE_STRIDE``), in column 0.
        """
        ...

    def product_scatter(self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor) -> None:
        """Compute ``y = reduce_scatter(x W)``, summed in the dtype of y.

        Args:
            x_TK, scale_inverse, product: see :meth:`gather_product`.
            y_sN: output for the tokens of this rank.

        Raises:
            ValueError: the number of ranks does not divide the number of tokens.
        """
        ...

    def start_product_scatter(
        self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor
    ) -> Underway:
        """Start :meth:`product_scatter`; its transfer may overlap with later work, and y is valid after ``wait()``."""
        ...


class CollectiveProducts:
    """Products with the transfer before or after them, by collectives of the backend: NCCL on GPUs, Gloo on CPUs."""

    name = "collective"

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def begin(self) -> None:
        """Do nothing, because no state is left from the previous pass."""

    def gather_product(
        self,
        x_sK: Tensor,
        scale_inverse: Tensor | None,
        product: RowProduct,
        y_TN: Tensor,
        x_TK: Tensor | None = None,
        scales_R4: Tensor | None = None,
    ) -> None:
        """See :class:`TokenProducts`."""
        x_TK = self._parallel.all_gather(x_sK, x_TK)
        if scale_inverse is None:
            product(x_TK, None, y_TN)
            return
        scales = self._parallel.all_gather(scale_inverse.expand(1, SCALE_STRIDE), scales_R4)
        parts = zip(x_TK.chunk(len(scales)), scales[:, 0], y_TN.chunk(len(scales)), strict=True)
        for x_nK, scale, y_nN in parts:
            product(x_nK, scale, y_nN)

    def product_scatter(self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor) -> None:
        """See :class:`TokenProducts`."""
        self.start_product_scatter(x_TK, scale_inverse, product, y_sN).wait()

    def start_product_scatter(
        self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor
    ) -> Underway:
        """See :class:`TokenProducts`."""
        if self._parallel.size == 1:
            product(x_TK, scale_inverse, y_sN)
            return Underway(x_TK, y_sN, None)
        y_TN = y_sN.new_empty(len(x_TK), y_sN.shape[1])
        product(x_TK, scale_inverse, y_TN)
        return self._parallel.start_reduce_scatter(y_TN, y_sN)


def times(weight_KN: Tensor) -> RowProduct:
    """Return the product with a matrix that has the dtype of the rows."""

    def product(x_nK: Tensor, scale_inverse: Tensor | None, y_nN: Tensor) -> None:
        torch.mm(x_nK, weight_KN, out=y_nN)

    return product
