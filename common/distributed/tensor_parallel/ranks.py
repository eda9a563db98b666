"""Ranks of the ``tp`` axis, which share layers, and the token transfers between them.

Between tensor-parallel layers, norms and residuals of a token are computed by one rank only (sequence parallelism,
Korthikanti et al. 2022, section 4.2.2): tokens, dimension 0, are sharded evenly in rank order. A layer that needs all
tokens gathers them; a layer whose result is a sum over ranks reduce-scatters it. Each is the backward pass of the
other.

Every transfer exists with autograd, and without it for hand-written backward passes.

Shapes: T tokens, s = T / ranks tokens of one rank; any further dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
        result: output.
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
        size: number of ranks.
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

    def reduce_scatter(self, x_T: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the same as :meth:`scatter_tokens`, without autograd. Collective.

        Args:
            x_T: summands of this rank, with the same shape on all ranks.
            out: output, contiguous (s, ...); None for a new tensor, or for ``x_T`` itself on one rank.

        Raises:
            ValueError: the number of ranks does not divide the number of tokens.
        """
        if self.size == 1:
            return x_T if out is None else out.copy_(x_T)
        own = self.own_count(x_T.shape[0])
        out = x_T.new_empty(own, *x_T.shape[1:]) if out is None else out
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
