"""Linear layers that are sharded over ranks, with low-rank adapters (LoRA, Hu et al. 2021).

- Column-parallel: a rank holds some of the outputs (Shoeybi et al. 2019, section 3). Its input tokens are gathered.
- Row-parallel: a rank holds some of the inputs. Results are partial sums, which are reduce-scattered by tokens.

Adapters transfer only u = A x, whose width is the adapter's rank. Column-parallel: A is replicated and reads the rank's
own tokens, so its gradient is a partial sum; u is gathered, and the rows of B are sharded. Row-parallel: the columns of
A are sharded, u is a partial sum that is reduce-scattered, and B is replicated and reads the rank's own tokens. Each
layer states in ``partial_over`` the axes over which gradients must still be summed (``ParameterGroup.summed_over``).

Shapes: T tokens, s = T / ranks tokens of one rank, I inputs, O outputs, i and o those of one rank, r rank of an
adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.distributed.tensor_parallel.ranks import AXIS, CollectiveProducts, TensorParallel, TokenProducts, times
from common.distributed.tensor_split import TensorSplit

Dropout = Callable[[Tensor, Tensor, int, int], Tensor]
"""Dropout of an adapter's input: ``dropout(x, rows, columns, first_column)``.

x is (rows, some columns). ``rows``, int64, are token indices within the micro-batch, ``columns`` is the number of
columns of the whole input, and ``first_column`` is the index of x's first column. A mask that depends only on row and
column is then the same in every layout.
"""


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapter: y += alpha / rank * B A dropout(x).

    Attributes:
        rank: rank r of the adapter.
        alpha: numerator of the scale.
    """

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Return the scale of the adapter's result, alpha / rank."""
        return self.alpha / self.rank


class ColumnParallelLinear(nn.Module):
    """Linear layer ``y_To = all_tokens(x_sI) W^T``; each rank holds some of the output columns.

    Args:
        in_features: number of inputs, I.
        parts: output columns of all ranks in each part that is sharded separately: ``(O,)``, or those of query, key and
            value (:func:`common.distributed.tensor_parallel.ranks.qkv_parts`).
        adapter: low-rank adapter; None for no adapter.
        device, dtype: device and dtype of the parameters, which are not initialised.

    Attributes:
        weight, bias, lora_a, lora_b: (o, I), (o,), (r, I), (o, r); None if absent.
        splits: split over the ranks, by name of each sharded parameter.
        partial_over: axes over which gradients must still be summed, by name of the parameter.

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
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._parallel, self._product = parallel, column_product(parallel)
        self.adapter, outputs, parts = adapter, sum(parts), tuple(parts)
        shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, in_features)}
        shapes |= {"bias": (outputs,)} if bias else {}
        shapes |= {"lora_b": (outputs, adapter.rank)} if adapter is not None else {}
        self.splits = {
            n: TensorSplit.sharded(shape, 0, parts, parallel.size, parallel.index) for n, shape in shapes.items()
        }
        local = {name: split.local_shape for name, split in self.splits.items()}
        if adapter is not None:
            local["lora_a"] = (adapter.rank, in_features)
        _register(self, local, device, dtype)
        self.partial_over: Mapping[str, tuple[str, ...]] = {"lora_a": (AXIS,)} if adapter is not None else {}

    def forward(self, x_sI: Tensor, dropout: Dropout | None = None, rows_T: Tensor | None = None) -> Tensor:
        """Return this rank's output columns (T, o) for all tokens. Collective.

        Args:
            rows_T: indices of all tokens within the micro-batch, for ``dropout``; None for 0 ... T - 1.
        """
        y_To = self._product(x_sI, self.weight, None)
        if self.adapter is not None:
            if dropout is not None:
                rows_T = _counted(rows_T, x_sI.shape[0] * self._parallel.size, x_sI.device)
                x_sI = dropout(x_sI, self._parallel.own_tokens(rows_T), x_sI.shape[1], 0)
            u_Tr = self._parallel.gather_tokens(F.linear(x_sI, self.lora_a))
            y_To = y_To + self.adapter.scale * F.linear(u_Tr, self.lora_b)
        return y_To if self.bias is None else y_To + self.bias


class RowParallelLinear(nn.Module):
    """Linear layer ``y_sO = own_tokens(sum over ranks of x_Ti W^T)``; each rank holds some of the inputs.

    Args:
        in_features: number of inputs over all ranks, I.
        out_features: number of outputs, O.

    Attributes:
        weight, bias, lora_a, lora_b: (O, i), (O,), (r, i), (O, r); None if absent.

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
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._parallel, self._product = parallel, row_product(parallel)
        self.adapter, self.in_features = adapter, in_features
        shapes = {"weight": (out_features, in_features)}
        shapes |= {"lora_a": (adapter.rank, in_features)} if adapter is not None else {}
        self.splits = {
            name: TensorSplit.sharded(shape, 1, (in_features,), parallel.size, parallel.index)
            for name, shape in shapes.items()
        }
        local: dict[str, tuple[int, ...]] = {name: split.local_shape for name, split in self.splits.items()}
        whole: dict[str, tuple[int, ...]] = {"bias": (out_features,)} if bias else {}
        whole |= {"lora_b": (out_features, adapter.rank)} if adapter is not None else {}
        _register(self, local | whole, device, dtype)
        self.partial_over: Mapping[str, tuple[str, ...]] = dict.fromkeys(whole, (AXIS,))

    def forward(self, x_Ti: Tensor, dropout: Dropout | None = None, rows_T: Tensor | None = None) -> Tensor:
        """Return the outputs (s, O) of this rank's tokens, summed over ranks. Collective.

        Args:
            x_Ti: this rank's inputs for all tokens.
        """
        y_sO = self._product(x_Ti, self.weight, None)
        if self.adapter is not None:
            if dropout is not None:
                rows_T = _counted(rows_T, x_Ti.shape[0], x_Ti.device)
                x_Ti = dropout(x_Ti, rows_T, self.in_features, self._parallel.index * x_Ti.shape[1])
            u_sr = self._parallel.scatter_tokens(F.linear(x_Ti, self.lora_a))
            y_sO = y_sO + self.adapter.scale * F.linear(u_sr, self.lora_b)
        return y_sO if self.bias is None else y_sO + self.bias


def partial_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the axes over which gradients must still be summed, by full parameter name; other parameters are absent.

    They come from the attribute ``partial_over`` of all modules that have one, not only those of this file.
    """
    found = {}
    for prefix, module in model.named_modules():
        for name, axes in getattr(module, "partial_over", {}).items():
            found[f"{prefix}.{name}" if prefix else name] = axes
    return found


def tensor_splits(model: nn.Module) -> dict[str, TensorSplit]:
    """Return the splits of all sharded parameters, by full name.

    They come from the attribute ``splits`` of all modules that have one, not only those of this file.
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


def column_product(parallel: TensorParallel) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the product of a :class:`ColumnParallelLinear` without adapter: ``product(x_sI, weight_oI, bias_o)``.

    It takes the place of ``torch.nn.functional.linear``, and both passes are collective. The bias may be None.
    """
    products = CollectiveProducts(parallel)

    def product(x_sI: Tensor, weight_oI: Tensor, bias_o: Tensor | None) -> Tensor:
        y_To: Tensor = _GatheredProduct.apply(x_sI, weight_oI, products, parallel)
        return y_To if bias_o is None else y_To + bias_o

    return product


def row_product(parallel: TensorParallel) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the product of a :class:`RowParallelLinear` without adapter: ``product(x_Ti, weight_Oi, bias_O)``.

    It takes the place of ``torch.nn.functional.linear``, and both passes are collective. The bias may be None.
    """
    products = CollectiveProducts(parallel)

    def product(x_Ti: Tensor, weight_Oi: Tensor, bias_O: Tensor | None) -> Tensor:
        y_sO: Tensor = _ScatteredProduct.apply(x_Ti, weight_Oi, products, parallel)
        return y_sO if bias_O is None else y_sO + bias_O

    return product


class _GatheredProduct(torch.autograd.Function):
    """Product with gathered tokens. Backward gathers x again for a trainable weight; a frozen weight saves no x."""

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
