"""A product and the movement of tokens beside it: the two that every split layer consists of.

Column-parallel layers gather their tokens before the forward product and scatter the gradient after the backward one;
row-parallel layers do the reverse. So one implementation of the two serves all layers in both passes;
:mod:`common.distributed.tensor_parallel.overlap` has another.

Operands may be FP8, with the inverses of their scales. What is gathered is one tensor to the product: its scale has to
be the same on all ranks (:meth:`TensorParallel.agree_on_scales_`). A product that is scattered is each rank's own.

Shapes: T tokens, s = T / ranks; K the dimension that is summed over, N columns of the result.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common.distributed.tensor_parallel.ranks import TensorParallel


class Scales(NamedTuple):
    """What a product of FP8 operands is multiplied with, and what it becomes.

    Attributes:
        left, right: inverses of the scales that the operands were cast with, 0-d fp32.
        dtype: of the result, fp16 or bf16.
    """

    left: Tensor
    right: Tensor
    dtype: torch.dtype


class TokenProducts(Protocol):
    """Products whose left operand, or whose result, is dealt to the ranks by tokens. Collective, without autograd."""

    name: str

    def gather_product(
        self, x_sK: Tensor, b_KN: Tensor, keep: bool = False, scales: Scales | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``all_gather(x) @ b``: (T, N); and with ``keep`` what was gathered, (T, K).

        Args:
            x_sK: contiguous.
            b_KN: in FP8 its columns are contiguous.
            keep: whether the second result is wanted.
            scales: where the operands are FP8.
        """
        ...

    def product_scatter(self, x_TK: Tensor, b_KN: Tensor, scales: Scales | None = None) -> Tensor:
        """``reduce_scatter(x @ b)``: (s, N).

        Args:
            x_TK, b_KN, scales: see :meth:`gather_product`.
        """
        ...


class CollectiveProducts:
    """The movement first or last, by collectives of the backend: NCCL on GPUs, gloo on CPUs.

    Args:
        parallel: the ranks.
    """

    name = "collective"

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def gather_product(
        self, x_sK: Tensor, b_KN: Tensor, keep: bool = False, scales: Scales | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`TokenProducts`."""
        x_TK = self._parallel.all_gather(x_sK)
        return multiply(x_TK, b_KN, scales), x_TK if keep else None

    def product_scatter(self, x_TK: Tensor, b_KN: Tensor, scales: Scales | None = None) -> Tensor:
        """See :class:`TokenProducts`."""
        return self._parallel.reduce_scatter(multiply(x_TK, b_KN, scales))


def multiply(x_TK: Tensor, b_KN: Tensor, scales: Scales | None) -> Tensor:
    """``x @ b`` of operands in FP8 or in any other dtype."""
    if scales is None:
        return x_TK @ b_KN
    return torch._scaled_mm(
        x_TK, b_KN, scales.left, scales.right, out_dtype=scales.dtype, use_fast_accum=True
    )  # without scale_result: PyTorch 2.10 and 2.11 ignore it (pytorch issue 190449)
