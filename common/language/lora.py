"""Low-rank adapters (LoRA) of a decoder: settings, dropout, and the adapter of a product with a hand-written backward.

Hu et al., arXiv:2106.09685: ``y = x W^T + (alpha / r) dropout(x) A^T B^T``. Only the adapter's input has dropout. The
mask is a function of seed, call site and the element's index in the whole micro-batch. Thus no mask is stored, and
every split of tokens or columns over ranks drops the same elements.

Legend: as in :mod:`common.language.products`; r rank of the adapter, u = dropout(x) A^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.layers import Adapter, Dropout
from common.distributed.tensor_parallel.ranks import TensorParallel, Underway
from common.language.architecture import TokenPositions, Tokens
from common.ops.dropout.reference import DropoutMask, keep_mask, scale_of_kept, threshold
from common.ops.lora_input import Region
from common.ops.row_norm import RowNorm


@dataclass(frozen=True)
class LoraSettings(Adapter):
    """Settings of low-rank adapters.

    Attributes:
        dropout: probability of dropping an element of an adapter's input.
    """

    dropout: float


def adapter_dropout(lora: LoraSettings | None, site: int, positions: TokenPositions) -> Dropout | None:
    """Return the dropout of an adapter; None if nothing is dropped.

    Args:
        lora: options of the adapters; None without adapters.
        site: number of the call site. Different sites draw independent masks.
    """
    seed = positions.seed
    if lora is None or seed is None or threshold(lora.dropout) == 0:
        return None
    p = lora.dropout

    def dropout(x: Tensor, rows: Tensor, columns: int, first_column: int) -> Tensor:
        column = torch.arange(first_column, first_column + x.shape[1], device=x.device)
        keep = keep_mask(seed, site, rows.unsqueeze(1) * columns + column, p)
        return (x * scale_of_kept(p)).masked_fill(~keep, 0.0)

    return dropout


@dataclass(frozen=True)
class ProductAdapter:
    """Adapter of a column-parallel or row-parallel product, in 16 bits.

    The backward pass keeps u and recomputes the masked input. Only u and its gradient move between the ranks; their
    transfers are small and start before the product that they overlap with.

    Attributes:
        lora: rank, scale and dropout.
        columns: columns of the whole input.
        column_parallel: whether the input has this rank's tokens, and the result all tokens; else the reverse.
        lora_input: chosen implementation of the operation.
    """

    lora: LoraSettings
    site: int
    columns: int
    column_parallel: bool
    parallel: TensorParallel
    a: nn.Parameter
    b: nn.Parameter
    lora_input: Any

    def input(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return ``dropout(x)``, shape and dtype of ``x``; ``x`` itself without dropout."""
        mask = self._mask(tokens)
        if mask is None:
            return x
        result: Tensor = self.lora_input.dropped(x, mask, self._region(tokens))
        return result

    def input_again(self, norm: RowNorm, normed: tuple[Tensor, Tensor, Tensor], tokens: Tokens) -> Tensor:
        """Recompute and return ``dropout(x)``, where x is the result of an RMS norm.

        Args:
            normed: residual, moments and weight of the norm.
        """
        mask = self._mask(tokens)
        result: Tensor
        if mask is None:
            result = norm.recompute(*normed)
        else:
            result = self.lora_input.dropped_norm(*normed, mask, self._region(tokens))
        return result

    def start_forward(self, x: Tensor, tokens: Tokens) -> Underway:
        """Start to compute ``u = dropout(x) A^T``, (tokens of the product's result, rank). Collective."""
        u = self.input(x, tokens) @ self.a.t()
        return self.parallel.start_all_gather(u) if self.column_parallel else self.parallel.start_reduce_scatter(u)

    def add(self, y: Tensor, u: Tensor) -> None:
        """Add the adapter's part, ``scale u B^T``, to the product's result ``y``, in place."""
        y.addmm_(u, self.b.t(), alpha=self.lora.scale)

    def start_backward(self, dy: Tensor, u: Tensor) -> tuple[Underway, Tensor]:
        """Start to compute the gradient of u for the tokens of the input; return it and the gradient of B. Collective.

        Args:
            dy: gradient of the product's result.
            u: result of :meth:`start_forward`.
        """
        scale = self.lora.scale
        du, db = (dy @ self.b).mul_(scale), dy.t() @ (u * scale)
        parallel = self.parallel
        return parallel.start_reduce_scatter(du) if self.column_parallel else parallel.start_all_gather(du), db

    def add_input_gradient(self, dx: Tensor, du: Tensor, tokens: Tokens) -> None:
        """Add the adapter's part to ``dx``, the gradient of the product's input, in place.

        Args:
            du: gradient of u, for the tokens of the input.
        """
        mask = self._mask(tokens)
        if mask is None:
            dx.addmm_(du, self.a)
        else:
            self.lora_input.add_input_gradient(dx, du, self.a, mask, self._region(tokens))

    def _region(self, tokens: Tokens) -> Region:
        if self.column_parallel:
            return Region(tokens.own_in_batch, self.columns, 0)
        return Region(tokens.in_batch, self.columns, self.parallel.index * self.columns // self.parallel.size)

    def _mask(self, tokens: Tokens) -> DropoutMask | None:
        if tokens.seed is None or self.lora.dropout == 0:
            return None
        return DropoutMask(self.lora.dropout, tokens.seed, self.site)
