"""Ranks of the ``tp`` axis, which share layers, and the token transfers between them.

Between tensor-parallel layers, norms and residuals of a token are computed by one rank only (sequence parallelism,
Korthikanti et al. 2022, section 4.2.2): tokens, dimension 0, are sharded evenly in rank order. A layer that needs all
tokens gathers them; a layer whose result is a sum over ranks reduce-scatters it. Each is the backward pass of the
other. Every transfer exists with autograd, and without it for hand-written backward passes.

:class:`TokenProducts` joins a transfer with a matrix product. Column-parallel layers gather tokens before the forward
product and scatter gradients after the backward product; row-parallel layers do the reverse. So two operations serve
all layers in both passes: here by collectives, in :mod:`common.distributed.tensor_parallel.overlap` with transfers that
overlap with the product. FP8 rows are sent with the inverse of their scale: every rank casts its own tokens with its
own scale, which halves the transferred bytes.

Shapes: T tokens, s = T / ranks tokens of one rank, n any number of tokens, any further dimensions; K summed dimension,
N columns of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.layout import Layout
from common.errors import ConfigError

AXIS = "tp"


class Underway(NamedTuple):
    """Collective that overlaps with other work.

    Attributes:
        given: input, referenced as long as the collective reads it.
        work: the collective; None if a single rank has nothing to transfer.
    """

    given: Tensor
    result: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Return the result, which is valid for all work enqueued after this call."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class TensorParallel:
    """Ranks of the ``tp`` axis. A single rank transfers nothing and needs no process group.

    Attributes:
        index: position of this rank, 0 <= index < size.
        group: process group of the ranks; None if size is 1.
    """

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"rank {self.index} of {self.size} does not exist")
        if (self.group is None) != (self.size == 1):
            raise ValueError(f"{self.size} ranks and {'no group' if self.group is None else 'a group'}")

    @classmethod
    def from_layout(cls, layout: Layout) -> TensorParallel:
        """Return the ranks of the ``tp`` axis of ``layout``. Collective."""
        return cls(layout.size(AXIS), layout.coordinate(AXIS), layout.group(AXIS))

    def gather_tokens(self, x_s: Tensor) -> Tensor:
        """Return all tokens (T, ...); backward reduce-scatters the gradient. Both passes are collective.

        Args:
            x_s: tokens of this rank, (s, ...).
        """
        if self.size == 1:
            return x_s
        x_T: Tensor = _GatherTokens.apply(x_s, self)
        return x_T

    def scatter_tokens(self, x_T: Tensor) -> Tensor:
        """Return this rank's tokens (s, ...) of the sum over ranks; backward all-gathers. Both passes are collective.

        Raises:
            ValueError: the number of ranks does not divide the number of tokens.
        """
        if self.size == 1:
            return x_T
        x_s: Tensor = _ScatterTokens.apply(x_T, self)
        return x_s

    def gather_copies(self, x_s: Tensor) -> Tensor:
        """Return all tokens (T, ...) for computations that every rank repeats, such as the mean loss. Collective.

        All ranks compute the same gradient; backward returns this rank's tokens of it, without a sum over ranks.

        Args:
            x_s: tokens of this rank, (s, ...).
        """
        if self.size == 1:
            return x_s
        x_T: Tensor = _GatherCopies.apply(x_s, self)
        return x_T

    def all_gather(self, x_s: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the same as :meth:`gather_tokens`, without autograd; any dtype, including FP8. Collective.

        Args:
            x_s: tokens of this rank, with the same shape on all ranks.
            out: output, contiguous (T, ...); None for a new tensor, or for ``x_s`` itself on one rank.
        """
        if self.size == 1:
            return x_s if out is None else out.copy_(x_s)
        x_s = x_s.contiguous()
        out = x_s.new_empty(self.size * x_s.shape[0], *x_s.shape[1:]) if out is None else out
        dist.all_gather_into_tensor(_movable(out), _movable(x_s), group=self.group)
        return out

    def reduce_scatter(self, x_T: Tensor) -> Tensor:
        """Return the same as :meth:`scatter_tokens`, without autograd. Collective.

        Args:
            x_T: summands of this rank, with the same shape on all ranks. On one rank, the result is ``x_T`` itself.

        Raises:
            ValueError: the number of ranks does not divide the number of tokens.
        """
        if self.size == 1:
            return x_T
        out = x_T.new_empty(self.own_count(x_T.shape[0]), *x_T.shape[1:])
        dist.reduce_scatter_tensor(out, x_T.contiguous(), group=self.group)
        return out

    def start_all_gather(self, x_s: Tensor) -> Underway:
        """Start an :meth:`all_gather` that overlaps with later work. Collective."""
        if self.size == 1:
            return Underway(x_s, x_s, None)
        x_s = x_s.contiguous()
        out = x_s.new_empty(self.size * x_s.shape[0], *x_s.shape[1:])
        work = dist.all_gather_into_tensor(_movable(out), _movable(x_s), group=self.group, async_op=True)
        return Underway(x_s, out, work)

    def start_reduce_scatter(self, x_T: Tensor, out: Tensor | None = None) -> Underway:
        """Start a :meth:`reduce_scatter` that overlaps with later work. Collective."""
        if self.size == 1:
            return Underway(x_T, x_T if out is None else out.copy_(x_T), None)
        x_T = x_T.contiguous()
        own = self.own_count(x_T.shape[0])
        out = x_T.new_empty(own, *x_T.shape[1:]) if out is None else out
        return Underway(x_T, out, dist.reduce_scatter_tensor(out, x_T, group=self.group, async_op=True))

    def agree_on_scales_(self, scales: Tensor) -> None:
        """Set FP8 scales to their minimum over all ranks, in place, for use with another split. Collective.

        Each rank has seen the largest values of its own tokens and features only; with the smallest scale no value
        leaves the range of FP8. If a scale is 0 (not set yet) on any rank, it becomes 0 on all.

        Args:
            scales: scales, not their inverses; contiguous.
        """
        if self.group is not None:
            dist.all_reduce(scales, op=dist.ReduceOp.MIN, group=self.group)

    def own_tokens(self, x_T: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor that every rank holds, as a view.

        Raises:
            ValueError: the number of ranks does not divide the number of tokens.
        """
        own = self.own_count(x_T.shape[0])
        return x_T.narrow(0, self.index * own, own)

    def own_count(self, tokens: int) -> int:
        """Return the number of tokens per rank.

        Raises:
            ValueError: the number of ranks does not divide ``tokens``.
        """
        if tokens % self.size:
            raise ValueError(f"{tokens} tokens cannot be sharded evenly over {self.size} ranks")
        return tokens // self.size


def _movable(x: Tensor) -> Tensor:
    """Return ``x``, or a byte view of it if it is FP8, because not every backend supports FP8 dtypes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_s: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.all_gather(x_s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_T: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.reduce_scatter(dx_T), None


class _GatherCopies(_GatherTokens):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_T: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.own_tokens(dx_T), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.reduce_scatter(x_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_s: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.all_gather(dx_s), None


def qkv_parts(heads: int, kv_heads: int, head_size: int, parallel: TensorParallel) -> tuple[int, int, int]:
    """Return the numbers of rows of query, key and value in a fused weight; each rank gets whole heads of each.

    Each part is sharded separately, so that a rank holds matching pieces of query, key and value.

    Raises:
        ConfigError: the number of ranks does not divide the number of heads.
    """
    _divide(parallel, "query heads", heads)
    _divide(parallel, "key/value heads", kv_heads)
    return heads * head_size, kv_heads * head_size, kv_heads * head_size


def gate_up_parts(feed_forward: int, parallel: TensorParallel) -> tuple[int, int]:
    """Return the numbers of rows of gate and up in a fused weight.

    Raises:
        ConfigError: the number of ranks does not divide ``feed_forward``.
    """
    _divide(parallel, "feed-forward units", feed_forward)
    return feed_forward, feed_forward


def _divide(parallel: TensorParallel, what: str, count: int) -> None:
    if count % parallel.size:
        raise ConfigError(f"layout.tp={parallel.size} does not divide the {count} {what}: choose a tp that does")


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
            x_TK: output for the gathered rows; None if the caller does not need them.
            scales_R4: output for the inverse scales of FP8 rows, fp32 (ranks, ``SCALE_STRIDE``), in column 0.
        """
        ...

    def product_scatter(self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor) -> None:
        """Compute ``y = reduce_scatter(x W)``, summed in the dtype of y.

        Args:
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


class CollectiveProducts(TokenProducts):
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
        x_TK = self._parallel.all_gather(x_sK, x_TK)
        if scale_inverse is None:
            product(x_TK, None, y_TN)
            return
        scales = self._parallel.all_gather(scale_inverse.expand(1, SCALE_STRIDE), scales_R4)
        parts = zip(x_TK.chunk(len(scales)), scales[:, 0], y_TN.chunk(len(scales)), strict=True)
        for x_nK, scale, y_nN in parts:
            product(x_nK, scale, y_nN)

    def product_scatter(self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor) -> None:
        self.start_product_scatter(x_TK, scale_inverse, product, y_sN).wait()

    def start_product_scatter(
        self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor
    ) -> Underway:
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
