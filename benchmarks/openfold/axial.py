"""Dynamic axial parallelism: the ranks of the layout's ``cp`` axis share one sample (Cheng et al., arXiv:2203.00854).

The alignment (B, S, N, C) and the pairs (B, I, J, C) are sharded over one of their two axes. An operation along the
whole other axis needs no transfer; for one along the sharded axis an all-to-all exchanges both. Values that depend on
all rows, such as the bias of an attention and one factor of a product over pairs, are gathered.

All ranks compute the same loss, from tensors that :meth:`AxialSplit.gather` has made whole. A gradient is therefore the
gradient of this loss, and not a part of a sum, wherever a tensor is whole and all ranks use it in the same way. Each
rank of the split computes a part of the gradients of the weights that it applies to its shard. The optimizer sums these
over ``cp``; weights outside the split belong in a group with ``replicated_over=("cp",)``.

Transfers can overlap with other work: ``start_gather`` and ``start_transpose`` return a :class:`Pending`. In the
backward pass the reverse transfer overlaps with the same work. All ranks must start and wait in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import Underway

AXIS = "cp"


@dataclass(frozen=True)
class AxialSplit:
    """Ranks that share a sample. A single rank transfers nothing: every method returns its input.

    Attributes:
        ranks: number of shards of an axis.
        index: position of this rank's shard, 0 <= index < ranks.
        group: process group of the ranks; None if ranks is 1.
    """

    ranks: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.ranks:
            raise ValueError(f"shard {self.index} of {self.ranks} does not exist")
        if (self.group is None) != (self.ranks == 1):
            raise ValueError(f"{self.ranks} shards and {'no group' if self.group is None else 'a group'}")

    @classmethod
    def from_layout(cls, layout: Layout) -> AxialSplit:
        """Return the split over the ``cp`` axis of ``layout``. Collective."""
        return cls(layout.size(AXIS), layout.coordinate(AXIS), layout.group(AXIS))

    def own_size(self, size: int) -> int:
        """Return the positions that each rank holds of an axis with ``size`` positions.

        Raises:
            ValueError: the number of ranks does not divide ``size``.
        """
        if size % self.ranks:
            raise ValueError(f"an axis of {size} positions cannot be sharded evenly over {self.ranks} ranks")
        return size // self.ranks

    def offset(self, size: int) -> int:
        """Return the index of this rank's first position on an axis with ``size`` positions; see :meth:`own_size`."""
        return self.index * self.own_size(size)

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that all ranks hold, contiguous. Backward gathers, so it is collective.

        Raises:
            ValueError: the number of ranks does not divide the axis.
        """
        if self.ranks == 1:
            return whole
        self.own_size(whole.shape[dim])
        own: Tensor = _Shard.apply(whole, self, dim % whole.dim())
        return own

    def gather(self, own: Tensor, dim: int) -> Tensor:
        """Return the whole tensor, which all ranks use in the same way. Collective. Backward keeps this rank's part."""
        return self.start_gather(own, dim, summed=False).wait()

    def gather_summed(self, own: Tensor, dim: int) -> Tensor:
        """Return the whole tensor, which each rank uses with its own shard of another.

        Backward sums the gradients of all ranks and keeps this rank's part. Both passes are collective.
        """
        return self.start_gather(own, dim, summed=True).wait()

    def transpose(self, own: Tensor, gathered_dim: int, sharded_dim: int) -> Tensor:
        """Return the tensor with ``sharded_dim`` sharded instead of ``gathered_dim``. Both passes are collective.

        Raises:
            ValueError: the number of ranks does not divide the axis to shard.
        """
        return self.start_transpose(own, gathered_dim, sharded_dim).wait()

    def start_gather(self, own: Tensor, dim: int, *, summed: bool) -> Pending:
        """Start :meth:`gather_summed` or, without ``summed``, :meth:`gather`. Collective."""
        dim %= own.dim()
        reverse = _ReduceScatter(self, dim) if summed else _Slice(self, dim)
        return self._start(own, _AllGather(self, dim), reverse)

    def start_transpose(self, own: Tensor, gathered_dim: int, sharded_dim: int) -> Pending:
        """Start :meth:`transpose`. Collective."""
        gathered_dim, sharded_dim = gathered_dim % own.dim(), sharded_dim % own.dim()
        self.own_size(own.shape[sharded_dim])
        return self._start(own, _AllToAll(self, sharded_dim, gathered_dim), _AllToAll(self, gathered_dim, sharded_dim))

    def _start(self, own: Tensor, forward: _Transfer, backward: _Transfer) -> Pending:
        if self.ranks == 1:
            return Pending(lambda: own)
        state = _State(forward, backward)
        token = _Start.apply(own, state)
        return Pending(lambda: _Wait.apply(token, state))


class Pending:
    """A transfer that was started."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        """Return the result, which is valid for all work enqueued after this call. Call it once."""
        return self._finish()


@dataclass(frozen=True)
class _Transfer:
    """A transfer of tensors between the ranks of a split."""

    split: AxialSplit

    def start(self, x: Tensor) -> Underway:
        """Start to fill a buffer."""
        raise NotImplementedError

    def finish(self, buffer: Tensor) -> Tensor:
        """Return the result from the filled buffer."""
        raise NotImplementedError


def _pieces(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Return the equal pieces of an axis, contiguous (ranks, ...)."""
    return x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()


def _joined(pieces: Tensor, dim: int) -> Tensor:
    """Return the pieces (ranks, ...) joined along an axis, contiguous."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@dataclass(frozen=True)
class _AllGather(_Transfer):
    dim: int

    def start(self, x: Tensor) -> Underway:
        x = x.contiguous()
        buffer = x.new_empty(self.split.ranks, *x.shape)
        work = dist.all_gather_into_tensor(buffer.view(-1), x.view(-1), group=self.split.group, async_op=True)
        return Underway(x, buffer, work)

    def finish(self, buffer: Tensor) -> Tensor:
        return _joined(buffer, self.dim)


@dataclass(frozen=True)
class _ReduceScatter(_Transfer):
    dim: int

    def start(self, x: Tensor) -> Underway:
        pieces = _pieces(x, self.dim, self.split.ranks)
        buffer = torch.empty_like(pieces[0])
        work = dist.reduce_scatter_tensor(buffer.view(-1), pieces.view(-1), group=self.split.group, async_op=True)
        return Underway(pieces, buffer, work)

    def finish(self, buffer: Tensor) -> Tensor:
        return buffer


@dataclass(frozen=True)
class _Slice(_Transfer):
    dim: int

    def start(self, x: Tensor) -> Underway:
        own = self.split.own_size(x.shape[self.dim])
        return Underway(x, x.narrow(self.dim, self.split.index * own, own).contiguous(), None)

    def finish(self, buffer: Tensor) -> Tensor:
        return buffer


@dataclass(frozen=True)
class _AllToAll(_Transfer):
    split_dim: int
    joined_dim: int

    def start(self, x: Tensor) -> Underway:
        pieces = _pieces(x, self.split_dim, self.split.ranks)
        buffer = torch.empty_like(pieces)
        return Underway(pieces, buffer, dist.all_to_all_single(buffer, pieces, group=self.split.group, async_op=True))

    def finish(self, buffer: Tensor) -> Tensor:
        return _joined(buffer, self.joined_dim)


class _State:
    """A transfer, its reverse in the backward pass, and the one of them that is under way."""

    def __init__(self, forward: _Transfer, backward: _Transfer) -> None:
        self.forward, self.backward = forward, backward
        self._underway: Underway | None = None

    def start(self, transfer: _Transfer, x: Tensor) -> None:
        self._underway = transfer.start(x)

    def finish(self, transfer: _Transfer) -> Tensor:
        assert self._underway is not None, "a transfer is waited for once"
        buffer, self._underway = self._underway.wait(), None
        return transfer.finish(buffer)


class _Start(torch.autograd.Function):
    """Start a transfer. The result is an empty tensor, which connects it with :class:`_Wait` in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: _State) -> Tensor:
        ctx.state = state
        state.start(state.forward, x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.state.finish(ctx.state.backward), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, state: _State) -> Tensor:
        ctx.state = state
        return state.finish(state.forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.state.start(ctx.state.backward, gradients[0])
        return gradients[0].new_empty(0), None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: AxialSplit, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        return _Slice(split, dim).start(whole).result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gather = _AllGather(ctx.split, ctx.dim)
        return gather.finish(gather.start(gradients[0]).wait()), None, None
