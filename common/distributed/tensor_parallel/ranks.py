"""The ranks that hold a layer together, and what they move between them.

Between the layers that are split, norms and residuals are computed for a token by one rank alone (sequence parallelism,
Korthikanti et al. 2022, section 4.2.2): dimension 0, the tokens, is dealt evenly, rank after rank. A layer that needs
all tokens gathers them, and one whose result is a sum over the ranks scatters it. Each is the other's backward pass, so
that a gradient is whole wherever a tensor is.

Every movement exists twice: differentiable, and without autograd for those who write their own backward pass.

Shapes: T tokens, s = T / ranks tokens of one rank; further dimensions are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.layout import Layout

AXIS = "tp"


class Underway(NamedTuple):
    """A collective that runs beside other work.

    Attributes:
        given: what it reads, held as long.
        result: what it writes.
        work: the collective; None where one rank has nothing to move.
    """

    given: Tensor
    result: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The result, once it is there for what is enqueued from now on."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class TensorParallel:
    """The ranks of the ``tp`` axis; one alone moves nothing, and needs no process group.

    Attributes:
        size: ranks.
        index: which of them this is, 0 <= index < size.
        group: the ranks; None where size is 1.
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
        """The ``tp`` axis of ``layout``. Collective.

        Args:
            layout: of all ranks.
        """
        return cls(layout.size(AXIS), layout.coordinate(AXIS), layout.group(AXIS))

    def gather_tokens(self, x_s: Tensor) -> Tensor:
        """All tokens (T, ...) from each rank's own (s, ...); backward reduce-scatters. Collective in both passes."""
        if self.size == 1:
            return x_s
        x_T: Tensor = _GatherTokens.apply(x_s, self)
        return x_T

    def scatter_tokens(self, x_T: Tensor) -> Tensor:
        """This rank's own tokens (s, ...) of the sum over the ranks; backward all-gathers. Collective in both passes.

        Raises:
            ValueError: the ranks would not have equally many tokens.
        """
        if self.size == 1:
            return x_T
        x_s: Tensor = _ScatterTokens.apply(x_T, self)
        return x_s

    def all_gather(self, x_s: Tensor, out: Tensor | None = None) -> Tensor:
        """:meth:`gather_tokens` without autograd, of any dtype, FP8 included. Collective.

        Args:
            x_s: of equal shape on all ranks.
            out: (T, ...), contiguous, where the tokens go; None for a new tensor, or ``x_s`` itself on one rank.
        """
        if self.size == 1:
            return x_s if out is None else out.copy_(x_s)
        x_s = x_s.contiguous()
        out = x_s.new_empty(self.size * x_s.shape[0], *x_s.shape[1:]) if out is None else out
        dist.all_gather_into_tensor(_movable(out), _movable(x_s), group=self.group)
        return out

    def reduce_scatter(self, x_T: Tensor, out: Tensor | None = None) -> Tensor:
        """:meth:`scatter_tokens` without autograd. Collective.

        Args:
            x_T: of equal shape on all ranks.
            out: (s, ...), contiguous, where the sums go; None for a new tensor, or ``x_T`` itself on one rank.

        Raises:
            ValueError: the ranks would not have equally many tokens.
        """
        if self.size == 1:
            return x_T if out is None else out.copy_(x_T)
        own = self.own_count(x_T.shape[0])
        out = x_T.new_empty(own, *x_T.shape[1:]) if out is None else out
        dist.reduce_scatter_tensor(out, x_T.contiguous(), group=self.group)
        return out

    def start_all_gather(self, x_s: Tensor) -> Underway:
        """Begin :meth:`all_gather` beside what comes next. Collective."""
        if self.size == 1:
            return Underway(x_s, x_s, None)
        x_s = x_s.contiguous()
        out = x_s.new_empty(self.size * x_s.shape[0], *x_s.shape[1:])
        work = dist.all_gather_into_tensor(_movable(out), _movable(x_s), group=self.group, async_op=True)
        return Underway(x_s, out, work)

    def start_reduce_scatter(self, x_T: Tensor, out: Tensor | None = None) -> Underway:
        """Begin :meth:`reduce_scatter` beside what comes next. Collective."""
        if self.size == 1:
            return Underway(x_T, x_T if out is None else out.copy_(x_T), None)
        x_T = x_T.contiguous()
        own = self.own_count(x_T.shape[0])
        out = x_T.new_empty(own, *x_T.shape[1:]) if out is None else out
        return Underway(x_T, out, dist.reduce_scatter_tensor(out, x_T, group=self.group, async_op=True))

    def agree_on_scales_(self, scales: Tensor) -> None:
        """Set FP8 scales to the smallest of all ranks, in place, for those who share layers otherwise. Collective.

        Each rank has seen the largest value of its own tokens and features; with the smallest scale none of them leaves
        FP8's range. A scale of 0, for none yet, is 0 for all then.

        Args:
            scales: contiguous, not their inverses.
        """
        if self.group is not None:
            dist.all_reduce(scales, op=dist.ReduceOp.MIN, group=self.group)

    def own_tokens(self, x_T: Tensor) -> Tensor:
        """This rank's own tokens of what every rank has, a view.

        Raises:
            ValueError: the ranks would not have equally many tokens.
        """
        own = self.own_count(x_T.shape[0])
        return x_T.narrow(0, self.index * own, own)

    def own_count(self, tokens: int) -> int:
        """How many of ``tokens`` each rank has.

        Raises:
            ValueError: not equally many.
        """
        if tokens % self.size:
            raise ValueError(f"{tokens} tokens cannot be dealt evenly to {self.size} ranks")
        return tokens // self.size


def _movable(x: Tensor) -> Tensor:
    """``x``, or its bytes: not every backend knows the FP8 dtypes."""
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
