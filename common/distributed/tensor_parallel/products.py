"""A product and the movement of tokens beside it: the two that every split layer consists of.

Column-parallel layers gather their tokens before the forward product and scatter the gradient after the backward one;
row-parallel layers do the reverse. So one implementation of the two serves all layers in both passes;
:mod:`common.distributed.tensor_parallel.overlap` has another.

Shapes: T tokens, s = T / ranks; K the dimension that is summed over, N columns of the result.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.distributed.tensor_parallel.ranks import TensorParallel


class TokenProducts(Protocol):
    """Products whose left operand, or whose result, is dealt to the ranks by tokens. Collective, without autograd."""

    name: str

    def gather_product(self, x_sK: Tensor, b_KN: Tensor, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """``all_gather(x) @ b``: (T, N); and with ``keep`` what was gathered, (T, K)."""
        ...

    def product_scatter(self, x_TK: Tensor, b_KN: Tensor) -> Tensor:
        """``reduce_scatter(x @ b)``: (s, N)."""
        ...


class CollectiveProducts:
    """The movement first or last, by collectives of the backend: NCCL on GPUs, gloo on CPUs.

    Args:
        parallel: the ranks.
    """

    name = "collective"

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def gather_product(self, x_sK: Tensor, b_KN: Tensor, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """See :class:`TokenProducts`."""
        x_TK = self._parallel.all_gather(x_sK)
        return x_TK @ b_KN, x_TK if keep else None

    def product_scatter(self, x_TK: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`TokenProducts`."""
        return self._parallel.reduce_scatter(x_TK @ b_KN)
