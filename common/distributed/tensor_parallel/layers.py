"""Linear layers and an embedding of which each rank holds a part, with low-rank adapters (LoRA, Hu et al. 2021).

- Column-parallel: a rank has some of the outputs (Shoeybi et al. 2019, section 3). Tokens are gathered before.
- Row-parallel: a rank has some of the inputs. Results are partial sums, which are scattered to their tokens.

Adapters move only u, which is as narrow as their rank. Column-parallel: A is on every rank and sees the rank's own
tokens, so that the gradient of A is a part of a sum; u is gathered, and the rows of B are split. Row-parallel: the
columns of A are split, u is a partial sum that is scattered, and B is on every rank and sees its own tokens alone.
Every layer says in ``partial_over`` over which axes the gradients of its parameters are yet to be summed: what
``ParameterGroup.summed_over`` wants.

Shapes: T tokens, s = T / ranks tokens of one rank, I inputs, O outputs, i and o those of one rank, r the rank of an
adapter, V words, v those of one rank, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.distributed.tensor_parallel.products import CollectiveProducts, TokenProducts, times
from common.distributed.tensor_parallel.ranks import AXIS, TensorParallel
from common.distributed.tensor_split import Split

Dropout = Callable[[Tensor, Tensor, int, int], Tensor]
"""Dropout of an adapter's input: ``dropout(x, rows, columns, first_column)``.

x is (rows, some columns); ``rows`` int64 says which tokens of the micro-batch these are, ``columns`` how many columns
the whole input has, and ``first_column`` where those of x start. A mask that is a function of row and column is then
the same at every layout.
"""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: y += alpha / rank * B A dropout(x).

    Attributes:
        rank: r.
        alpha: numerator of the factor.
    """

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Factor on the adapter's result."""
        return self.alpha / self.rank


class ColumnParallelLinear(nn.Module):
    """``y_To = all_tokens(x_sI) W^T``, of which each rank has some columns.

    Args:
        in_features: I.
        parts: columns of all ranks together, by what is dealt separately: ``(O,)``, or those of query, key and value
            (:func:`common.distributed.tensor_parallel.shards.qkv_parts`).
        parallel: the ranks.
        adapter: None for none.
        bias: whether there is one.
        products: how tokens move beside products; None for collectives.
        device, dtype: of the parameters, which are not initialised.

    Attributes:
        weight, bias, lora_a, lora_b: (o, I), (o,), (r, I), (o, r); absent ones are None.
        splits: how the ranks share each parameter that they share, by name.
        partial_over: axes over which gradients are yet to be summed, by name of the parameter.

    Raises:
        ConfigError: ``tp`` does not divide one of the parts.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        parallel: TensorParallel,
        *,
        adapter: Adapter | None = None,
        bias: bool = False,
        products: TokenProducts | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._parallel, self._products = parallel, products or CollectiveProducts(parallel)
        self.adapter, outputs, parts = adapter, sum(parts), tuple(parts)
        shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, in_features)}
        shapes |= {"bias": (outputs,)} if bias else {}
        shapes |= {"lora_b": (outputs, adapter.rank)} if adapter is not None else {}
        self.splits = {n: Split.dealt(shape, 0, parts, parallel.size, parallel.index) for n, shape in shapes.items()}
        local = {name: split.local_shape for name, split in self.splits.items()}
        if adapter is not None:
            local["lora_a"] = (adapter.rank, in_features)
        _register(self, local, device, dtype)
        self.partial_over: Mapping[str, tuple[str, ...]] = {"lora_a": (AXIS,)} if adapter is not None else {}

    def forward(self, x_sI: Tensor, dropout: Dropout | None = None, rows_T: Tensor | None = None) -> Tensor:
        """Columns of this rank for all tokens. Collective.

        Args:
            x_sI: this rank's own tokens.
            dropout: of the adapter's input.
            rows_T: which tokens of the micro-batch all of them are, for ``dropout``; None for 0 ... T - 1.
        """
        y_To: Tensor = _GatheredProduct.apply(x_sI, self.weight, self._products, self._parallel)
        if self.adapter is not None:
            if dropout is not None:
                rows_T = _counted(rows_T, x_sI.shape[0] * self._parallel.size, x_sI.device)
                x_sI = dropout(x_sI, self._parallel.own_tokens(rows_T), x_sI.shape[1], 0)
            u_Tr = self._parallel.gather_tokens(F.linear(x_sI, self.lora_a))
            y_To = y_To + self.adapter.scale * F.linear(u_Tr, self.lora_b)
        return y_To if self.bias is None else y_To + self.bias


class RowParallelLinear(nn.Module):
    """``y_sO = own_tokens(sum over ranks of x_Ti W^T)``, of which each rank has some inputs.

    Args:
        in_features: I, of all ranks together.
        out_features: O.
        parallel, adapter, bias, products, device, dtype: see :class:`ColumnParallelLinear`.

    Attributes:
        weight, bias, lora_a, lora_b: (O, i), (O,), (r, i), (O, r); absent ones are None.
        splits, partial_over: see :class:`ColumnParallelLinear`.

    Raises:
        ConfigError: ``tp`` does not divide the inputs.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: TensorParallel,
        *,
        adapter: Adapter | None = None,
        bias: bool = False,
        products: TokenProducts | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._parallel, self._products = parallel, products or CollectiveProducts(parallel)
        self.adapter, self.in_features = adapter, in_features
        shapes = {"weight": (out_features, in_features)}
        shapes |= {"lora_a": (adapter.rank, in_features)} if adapter is not None else {}
        self.splits = {
            name: Split.dealt(shape, 1, (in_features,), parallel.size, parallel.index) for name, shape in shapes.items()
        }
        local: dict[str, tuple[int, ...]] = {name: split.local_shape for name, split in self.splits.items()}
        whole: dict[str, tuple[int, ...]] = {"bias": (out_features,)} if bias else {}
        whole |= {"lora_b": (out_features, adapter.rank)} if adapter is not None else {}
        _register(self, local | whole, device, dtype)
        self.partial_over: Mapping[str, tuple[str, ...]] = dict.fromkeys(whole, (AXIS,))

    def forward(self, x_Ti: Tensor, dropout: Dropout | None = None, rows_T: Tensor | None = None) -> Tensor:
        """Results of this rank's own tokens. Collective.

        Args:
            x_Ti: this rank's inputs of all tokens.
            dropout, rows_T: see :meth:`ColumnParallelLinear.forward`.
        """
        y_sO: Tensor = _ScatteredProduct.apply(x_Ti, self.weight, self._products, self._parallel)
        if self.adapter is not None:
            if dropout is not None:
                rows_T = _counted(rows_T, x_Ti.shape[0], x_Ti.device)
                x_Ti = dropout(x_Ti, rows_T, self.in_features, self._parallel.index * x_Ti.shape[1])
            u_sr = self._parallel.scatter_tokens(F.linear(x_Ti, self.lora_a))
            y_sO = y_sO + self.adapter.scale * F.linear(u_sr, self.lora_b)
        return y_sO if self.bias is None else y_sO + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Vectors of words, of which each rank has some.

    Args:
        vocabulary: V.
        hidden: E.
        parallel, device, dtype: see :class:`ColumnParallelLinear`.
        kept: rows that are words, the first ones, where others only make V divisible; None for all.

    Attributes:
        weight: (v, E).
        splits, partial_over: see :class:`ColumnParallelLinear`.

    Raises:
        ConfigError: ``tp`` does not divide the vocabulary.
    """

    weight: nn.Parameter

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        parallel: TensorParallel,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kept: int | None = None,
    ) -> None:
        super().__init__()
        self._parallel = parallel
        split = Split.dealt((vocabulary, hidden), 0, (vocabulary,), parallel.size, parallel.index, kept)
        self.splits = {"weight": split}
        _register(self, {"weight": split.local_shape}, device, dtype)
        self.partial_over: Mapping[str, tuple[str, ...]] = {}

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Vectors (s, E) of this rank's own tokens, given all of them (integers, equal on all ranks). Collective."""
        if self._parallel.size == 1:
            return F.embedding(tokens_T, self.weight)
        own = self.weight.shape[0]
        local_T = tokens_T - self._parallel.index * own
        elsewhere_T = (local_T < 0) | (local_T >= own)
        vectors_TE = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self._parallel.scatter_tokens(vectors_TE.masked_fill(elsewhere_T.unsqueeze(1), 0.0))


def partial_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Axes over which the gradient of a parameter is yet to be summed, by its full name; others have none.

    Read off the ``partial_over`` of all modules: those of this file, and any other that has one.
    """
    found = {}
    for prefix, module in model.named_modules():
        for name, axes in getattr(module, "partial_over", {}).items():
            found[f"{prefix}.{name}" if prefix else name] = axes
    return found


def tensor_splits(model: nn.Module) -> dict[str, Split]:
    """How the ranks share each parameter that they share, by its full name.

    Read off the ``splits`` of all modules: those of this file, and any other that has them.
    """
    return {
        f"{prefix}.{name}": split
        for prefix, module in model.named_modules()
        for name, split in getattr(module, "splits", {}).items()
    }


def _register(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype
) -> None:
    for name in ("weight", "bias", "lora_a", "lora_b"):
        shape = shapes.get(name)
        made = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        module.register_parameter(name, made)


def _counted(rows_T: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, device=device) if rows_T is None else rows_T


class _GatheredProduct(torch.autograd.Function):
    """x is gathered again in the backward pass of a weight that learns, and not kept for one that is frozen."""

    @staticmethod
    def forward(ctx: Any, x_sI: Tensor, weight_oI: Tensor, products: TokenProducts, parallel: TensorParallel) -> Tensor:
        ctx.products, ctx.parallel = products, parallel
        ctx.save_for_backward(x_sI if ctx.needs_input_grad[1] else None, weight_oI)
        y_To = x_sI.new_empty(parallel.size * len(x_sI), len(weight_oI))
        products.gather_product(x_sI.contiguous(), None, times(weight_oI.t()), y_To)
        return y_To

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_To: Tensor) -> tuple[Tensor | None, ...]:
        x_sI, weight_oI = ctx.saved_tensors
        dx_sI = None
        if ctx.needs_input_grad[0]:
            dx_sI = dy_To.new_empty(ctx.parallel.own_count(len(dy_To)), weight_oI.shape[1])
            ctx.products.product_scatter(dy_To, None, times(weight_oI), dx_sI)
        dweight_oI = dy_To.t() @ ctx.parallel.all_gather(x_sI) if ctx.needs_input_grad[1] else None
        return dx_sI, dweight_oI, None, None


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Ti: Tensor, weight_Oi: Tensor, products: TokenProducts, parallel: TensorParallel) -> Tensor:
        ctx.products, ctx.parallel = products, parallel
        ctx.save_for_backward(x_Ti if ctx.needs_input_grad[1] else None, weight_Oi)
        y_sO = x_Ti.new_empty(parallel.own_count(len(x_Ti)), len(weight_Oi))
        products.product_scatter(x_Ti, None, times(weight_Oi.t()), y_sO)
        return y_sO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sO: Tensor) -> tuple[Tensor | None, ...]:
        x_Ti, weight_Oi = ctx.saved_tensors
        T, learns = ctx.parallel.size * len(dy_sO), ctx.needs_input_grad[1]
        dx_Ti, dy_TO = None, dy_sO.new_empty(T, dy_sO.shape[1]) if learns else None
        if ctx.needs_input_grad[0]:
            dx_Ti = dy_sO.new_empty(T, weight_Oi.shape[1])
            ctx.products.gather_product(dy_sO.contiguous(), None, times(weight_Oi), dx_Ti, dy_TO)
        elif learns:
            ctx.parallel.all_gather(dy_sO, dy_TO)
        dweight_Oi = None if dy_TO is None else dy_TO.t() @ x_Ti
        return dx_Ti, dweight_Oi, None, None
