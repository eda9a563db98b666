"""Tokens that move while the product beside them runs: PyTorch's fused operations over symmetric memory.

They cut a product by ranks: what one rank's tokens give is computed while another's are copied, on two streams, through
memory that the GPUs of one node have mapped from each other. Small products lose by being cut, so each call decides by
its size; between nodes, and on CPUs, collectives remain.

The gathered tokens are always asked for, wanted or not: without them PyTorch takes an operation for small shapes that
multicasts, which not every machine allows.

Shapes: see :mod:`common.distributed.tensor_parallel.products`.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from common.distributed import one_machine
from common.distributed.tensor_parallel.products import CollectiveProducts, Scales, TokenProducts
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import UnsupportedImplementation
from common.ops.implementation import AUTO

LEAST_OPERATIONS = 2e11
"""Operations of a rank's product from which on it is cut: at some 600 TFLOP/s a third of a millisecond, several times
what the copies and barriers of a cut cost."""

FIRST_WORKSPACE = 1 << 20
"""Bytes of symmetric memory with which it is tried whether there can be any."""


class SymmetricMemoryProducts:
    """The fused operations for large products, collectives for others. Collective to build.

    The workspace grows with the largest tensor that is moved, of all layers together; it cannot grow while a graph is
    captured, so every shape runs once before, or ``reserve`` is called.

    Args:
        parallel: the ranks, two or more, on one machine.
        least_operations: 2 T K N of a rank's product from which on it is cut.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """

    name = "symmetric_memory"

    def __init__(self, parallel: TensorParallel, least_operations: float = LEAST_OPERATIONS) -> None:
        assert parallel.group is not None  # one rank moves nothing
        self._parallel = parallel
        self._group_name = parallel.group.group_name
        self._least_operations = least_operations
        self._collective = CollectiveProducts(parallel)
        self.reserve(FIRST_WORKSPACE)

    def reserve(self, size: int) -> None:
        """Let the workspace have at least ``size`` bytes. Collective.

        A gather needs a rank's own tokens (s, K), a scatter twice its results (s, N).
        """
        symmetric_memory.get_symm_mem_workspace(self._group_name, size)

    def gather_product(
        self, x_sK: Tensor, b_KN: Tensor, keep: bool = False, scales: Scales | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`common.distributed.tensor_parallel.products.TokenProducts`."""
        if not self._cuts(self._parallel.size * x_sK.shape[0], b_KN):
            return self._collective.gather_product(x_sK, b_KN, keep, scales)
        x_sK = x_sK.contiguous()
        if scales is None:
            x_TK, (y_TN,) = torch.ops.symm_mem.fused_all_gather_matmul(x_sK, [b_KN], 0, self._group_name)
        else:
            x_TK, (y_TN,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                x_sK, [b_KN], scales.left, [scales.right], 0, self._group_name, [None], [None], [scales.dtype], [True]
            )
        return y_TN, x_TK if keep else None

    def product_scatter(self, x_TK: Tensor, b_KN: Tensor, scales: Scales | None = None) -> Tensor:
        """See :class:`common.distributed.tensor_parallel.products.TokenProducts`."""
        T, N = x_TK.shape[0], b_KN.shape[1]
        if not self._cuts(T, b_KN):
            return self._collective.product_scatter(x_TK, b_KN, scales)
        self._parallel.own_count(T)
        name = self._group_name
        if scales is None:
            y_sN: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TK, b_KN, "sum", 0, name)
        else:
            left, right, dtype = scales
            y_sN = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x_TK, b_KN, left, right, "sum", 0, 0, name, [T, N], None, None, dtype, True
            )
        return y_sN

    def _cuts(self, tokens: int, b_KN: Tensor) -> bool:
        return 2.0 * tokens * b_KN.numel() >= self._least_operations


PRODUCTS = (SymmetricMemoryProducts.name, CollectiveProducts.name)
"""What a user may choose between, beside ``auto``."""


def build_products(parallel: TensorParallel, device: torch.device, requested: str = AUTO) -> TokenProducts:
    """How the tokens of split layers move. Collective; all ranks get the same.

    Args:
        parallel: the ranks.
        device: of the layers.
        requested: one of ``PRODUCTS``, or ``auto``: symmetric memory where all ranks are on one machine and can map
            each other's memory, else collectives.

    Raises:
        UnsupportedImplementation: the name is unknown, or these ranks cannot use it.
    """
    if requested not in (AUTO, *PRODUCTS):
        names = ", ".join((AUTO, *PRODUCTS))
        raise UnsupportedImplementation(f"unknown movement of tokens {requested!r}; choose one of {names}")
    if requested != CollectiveProducts.name:
        products, reason = _try_symmetric_memory(parallel, device)
        if products is not None:
            return products
        if requested != AUTO:
            raise UnsupportedImplementation(f"movement of tokens by {requested!r} cannot be used: {reason}")
    return CollectiveProducts(parallel)


def _try_symmetric_memory(
    parallel: TensorParallel, device: torch.device
) -> tuple[SymmetricMemoryProducts | None, str | None]:
    """Build it where every rank can, or say why not."""
    if parallel.group is None:
        return None, "one rank moves nothing"
    refused = one_machine.refusal(parallel.group, device)
    if refused is not None:
        return None, refused
    products, reason = None, "another rank cannot map its neighbours' memory"
    try:
        products = SymmetricMemoryProducts(parallel)
    except RuntimeError as error:
        reason = f"the GPUs cannot map each other's memory: {str(error).splitlines()[0]}"
    if not all(one_machine.gathered(int(products is not None), parallel.group, device)):
        return None, reason
    return products, None
