"""A product and the movement of tokens beside it: the two that every split layer consists of.

Column-parallel layers gather their tokens before the forward product and scatter the gradient after the backward one;
row-parallel layers do the reverse. So one implementation of the two serves all layers in both passes;
:mod:`common.distributed.tensor_parallel.overlap` has another.

The product itself is the caller's, a function of any rows. Rows in FP8 come with the inverse of their scale, which
travels with them: every rank casts its own tokens with a scale of its own, and half as many bytes move.

Shapes: T tokens, s = T / ranks, n any number of them; K the dimension that is summed over, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.distributed.tensor_parallel.ranks import TensorParallel, Underway

RowProduct = Callable[[Tensor, Tensor | None, Tensor], object]
"""``product(x_nK, scale_inverse, y_nN)`` writes ``x W`` into y; ``scale_inverse``, 0-d fp32, is that of FP8 rows."""


SCALE_STRIDE = 4
"""Of the scales of several ranks in one tensor: cuBLASLt wants each on a multiple of 16 bytes."""


class TokenProducts(Protocol):
    """Products whose left operand, or whose result, is dealt to the ranks by tokens. Collective, without autograd."""

    name: str

    def begin(self) -> None:
        """Before the first product of a forward pass, which may be captured and replayed."""
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
        """``y = all_gather(x) W``.

        Args:
            x_sK: contiguous.
            scale_inverse: 0-d fp32, of own rows in FP8; None for other dtypes.
            product: see :data:`RowProduct`.
            y_TN: where the result goes.
            x_TK: where all rows go, for those who want them too.
            scales_R4: fp32 (ranks, ``SCALE_STRIDE``), where the inverse scales of FP8 rows go, into column 0.
        """
        ...

    def product_scatter(self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor) -> None:
        """``y = reduce_scatter(x W)``, summed in the dtype of y.

        Args:
            x_TK, scale_inverse, product: see :meth:`gather_product`.
            y_sN: where the result goes.

        Raises:
            ValueError: the ranks would not have equally many tokens.
        """
        ...

    def start_product_scatter(
        self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor
    ) -> Underway:
        """:meth:`product_scatter` whose movement may go on beside what comes next; y is there after ``wait()``."""
        ...


class CollectiveProducts:
    """The movement first or last, by collectives of the backend: NCCL on GPUs, gloo on CPUs.

    Args:
        parallel: the ranks.
    """

    name = "collective"

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def begin(self) -> None:
        """Nothing is left over from the pass before."""

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
    """The product with a matrix in the dtype of the rows."""

    def product(x_nK: Tensor, scale_inverse: Tensor | None, y_nN: Tensor) -> None:
        torch.mm(x_nK, weight_KN, out=y_nN)

    return product
