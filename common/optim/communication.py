"""Traffic between ranks: gradients are reduced during the backward pass, weights gathered during the forward pass.

**Reduction.** A bucket is a contiguous slice of a flat gradient buffer, so nothing is copied. Gradients are summed,
never averaged: the update applies the factor once, and summing over ranks then equals accumulating over micro-batches.

- Without shards every rank receives the whole sum (all-reduce).
- With shards each rank needs only its piece of each bucket: a reduce-scatter over the ranks that share the shards,
  then an all-reduce of the pieces over ranks that hold the same shard, if there are several.
- ``all_reduce=True`` instead sums whole buckets over all ranks at once and keeps the piece, which suits networks
  whose switches reduce.
- With a :class:`common.optim.peer_exchange.PeerExchange`, copy engines replace the scatter: pieces are pushed to their
  owners, which add them up after the backward pass.

A sum in fp16 may overflow although its terms do not. ``predivide`` of :class:`common.optim.precision.LossScale`
divides all gradients beforehand.

**Gathering.** An update leaves each rank with the new weights of its shard only. The gathers start at the beginning of
the *next* iteration, in the order in which the forward pass reads the weights, and each block of the model waits for
its weights just before it runs. A captured iteration therefore waits for every gather that it starts. Between
iterations the model has the weights of the update before the last; :meth:`WeightGatherer.gather` brings it up to date.
A gather is a collective, or copies from the other ranks' shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.ops.device_clock import milliseconds, stamp
from common.optim.buffers import Bucket, FlatBuffer, Segment
from common.optim.groups import Route
from common.optim.peer_exchange import PeerExchange, PeerPieces, Transfer, add_pieces

AHEAD = 2
"""A block that runs starts the gathers of the block this many positions later.

Starting all gathers at once was slow: behind a hundred captured gathers, the first block was seen to wait until most
were done, probably because a GPU's queue holds only so many kernels, in capture order. Measurements:
docs/notes/scaling.md, "Where gathers of weights start".
"""


@dataclass(frozen=True)
class _Reduction:
    """One bucket and the tensors of its reduction.

    Attributes:
        gradients: the whole bucket.
        own: this rank's piece of ``gradients``.
        piece: destination of the sum of this rank's piece; None: in place.
        scattered: output of the scatter: ``piece``, or several pieces of ``gradients``.
        route: ranks to sum over.
        pieces: copies to and from other ranks; None: the bucket is reduced by collectives.
    """

    bucket: Bucket
    gradients: Tensor
    own: Tensor
    piece: Tensor | None
    scattered: Tensor
    route: Route
    pieces: PeerPieces | None = None


class GradientReducer:
    """Sums the gradients of flat buffers over process groups.

    Once armed, a bucket is reduced as soon as the gradients of all its parameters are final. Buckets start in one
    fixed order, which is the same on every rank even if some ranks leave parameters unused. Inside CUDA graph capture
    the collectives are captured with the backward pass. Compile a model block by block: compiled as a whole, it makes
    all gradients final only at the end of its backward pass, and nothing overlaps.

    Args:
        routes: for each parameter group, the ranks to sum over.
        overlap: False reduces everything in :meth:`finish`.
        all_reduce: with shards, sum whole buckets over all ranks and keep the piece.
        exchange: copies pieces between the ranks that share shards; None: collectives do.

    Attributes:
        buckets: number of buckets that are reduced in an iteration.
        launched: number of buckets launched so far in this iteration.
        sends: False launches no collective, so that every rank keeps its local gradients; for measurements only.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        routes: Sequence[Route],
        overlap: bool,
        all_reduce: bool = False,
        exchange: PeerExchange | None = None,
    ) -> None:
        self._reductions = _plan(buffers, routes, exchange)
        self._all_reduce = all_reduce
        self._exchange = exchange
        self._overlap = overlap
        kept = [(r.piece, r.own) for r in self._reductions if r.piece is not None] if all_reduce else []
        self._kept = [piece for piece, _ in kept], [own for _, own in kept]
        self._bucket_of = {s.name: i for i, r in enumerate(self._reductions) for s in r.bucket.segments}
        device = buffers[0].device
        scatters = exchange is None and not all_reduce
        staged = scatters and any(r.piece is not None and _in_stages(r.route) for r in self._reductions)
        self._side = torch.cuda.Stream(device) if staged and device.type == "cuda" else None
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._armed_parameters: set[int] = set()
        self._missing: list[set[str]] = []
        self.buckets = len(self._reductions)
        self.launched = 0
        self.sends = True
        self._works: list[Transfer] = []
        self._moments = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self.begin()

    def begin(self) -> None:
        """Start an iteration: nothing has been reduced."""
        self._armed = False
        self._armed_parameters = set()
        self._missing = [{s.name for s in r.bucket.segments} for r in self._reductions]
        self.launched = 0
        self._works = []

    def arm(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Let the next backward pass launch buckets: it is the last of the iteration, or the last of ``parameters``.

        The first call registers the hooks. Call it on the stream that the backward passes use.

        Args:
            parameters: parameters whose last gradient of the iteration comes from the next backward pass; None for
                all.
        """
        if not self._overlap:
            return
        if not self._hooks:
            self._hooks = [self._register(s) for r in self._reductions for s in r.bucket.segments]
        if parameters is None:
            self._armed = True
        else:
            self._armed_parameters.update(id(parameter) for parameter in parameters)

    def finish(self, factor: Tensor | None = None) -> None:
        """Launch the remaining buckets (with parameters that got no gradient) and wait for all.

        On a GPU the current stream waits, not the host.

        Args:
            factor: with an exchange, factor for all gradients of this rank, 0-d; None: 1 on all ranks.
        """
        self._armed = False
        self._armed_parameters = set()
        if not self._reductions:
            return
        stamp(self._moments[0])
        while self.launched < self.buckets:
            self._launch()
        if self._exchange is not None:
            self._add_up(self._exchange, factor)
        for work in self._works:
            work.wait()
        self._works = []
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        if self._kept[0] and self.sends:
            torch._foreach_copy_(*self._kept)
        stamp(self._moments[1])

    @property
    def wait_ms(self) -> Tensor | None:
        """Milliseconds that the last :meth:`finish` waited: reduction time that the backward pass did not hide.

        0-d fp32 on the device; None if there is nothing to reduce.
        """
        return milliseconds(self._moments[0], self._moments[1]) if self._reductions else None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._armed = False

    def _register(self, segment: Segment) -> RemovableHandle:
        name = segment.name
        return segment.parameter.register_post_accumulate_grad_hook(lambda p: self._on_gradient(name, p))

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if not self._armed and id(parameter) not in self._armed_parameters:
            return
        missing = self._missing[self._bucket_of[name]]
        if name not in missing:
            raise RuntimeError(
                f"parameter {name!r} received a second gradient after arm(): arm the optimizer before the last "
                "backward pass of the iteration only, or use overlap=False"
            )
        missing.remove(name)
        while self.launched < self.buckets and not self._missing[self.launched]:
            self._launch()

    def _add_up(self, exchange: PeerExchange, factor: Tensor | None) -> None:
        """Wait for the pieces of the other ranks and add them up; start the sums over ranks with the same shard."""
        if factor is not None:
            exchange.send_factor(factor)
        exchange.meet().wait()
        for reduction in self._reductions if self.sends else ():
            assert reduction.piece is not None
            assert reduction.pieces is not None
            add_pieces(reduction.own, reduction.pieces.staged, reduction.piece, factor, exchange.factors)
            if reduction.route.across is not None:
                self._works.append(_summed(reduction.piece, reduction.route.across))

    def _launch(self) -> None:
        reduction = self._reductions[self.launched]
        self.launched += 1
        if not self.sends:
            return
        if self._exchange is not None and reduction.pieces is not None:
            self._exchange.copy(reduction.pieces.pushes)
            return
        piece, route = reduction.piece, reduction.route
        if piece is None or self._all_reduce:
            if route.everyone is not None:
                self._works.append(_summed(reduction.gradients, route.everyone))
        elif not _in_stages(route):
            self._works.append(_scattered(piece, reduction.gradients, route.shard))
        else:
            with self._beside():
                if route.shard is not None:
                    _scattered(reduction.scattered, reduction.gradients, route.shard).wait()
                if route.pieces > 1:
                    piece.copy_(reduction.own)
                if route.across is not None:
                    self._works.append(_summed(piece, route.across))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Use a side stream, where one collective may wait for another while the backward pass goes on."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield


def _in_stages(route: Route) -> bool:
    """Return whether a rank needs more than a scatter to get the sum of its piece."""
    return route.pieces > 1 or route.across is not None


def _summed(values: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None  # this rank is a member of the group
    return work


def _scattered(piece: Tensor, values: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.reduce_scatter_tensor(piece, values, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work


def _plan(buffers: Sequence[FlatBuffer], routes: Sequence[Route], exchange: PeerExchange | None) -> list[_Reduction]:
    """Return all reductions, in the estimated order in which the backward pass completes their buckets.

    Groups interleave in the model (weights and biases of the same layers), so the position of a bucket is estimated
    from the position of its first parameter within its group. Backward passes reach that parameter last.
    """
    reductions = []
    for number, buffer in enumerate(buffers):
        for bucket in reversed(buffer.buckets):
            route = routes[bucket.group]
            if route.everyone is None and buffer.is_whole:
                continue
            target = None if buffer.is_whole else buffer.shard.gradients[bucket.in_shard]
            values, own = buffer.gradients[bucket.start : bucket.stop], buffer.gradients[bucket.own]
            scattered = own if target is None else target
            if route.pieces > 1:
                size = own.numel() * route.pieces
                scattered = values.split(size)[(bucket.own.start - bucket.start) // size]
            pieces = None if exchange is None else exchange.pieces(number, buffer, bucket, route.pieces)
            reductions.append(_Reduction(bucket, values, own, target, scattered, route, pieces))
    return sorted(reductions, key=lambda reduction: (reduction.route.late, reduction.bucket.readiness))


@dataclass(frozen=True)
class _Gather:
    """The gather of one bucket from ``piece`` into ``weights``.

    ``readers`` are the indices of the blocks that read it; -1 stands for other code. ``pieces`` has the copies that
    replace a collective, if there are any.
    """

    piece: Tensor
    weights: Tensor
    readers: frozenset[int]
    pieces: PeerPieces | None


class WeightGatherer:
    """Gathers shards into the flat parameter buffers.

    Args:
        group: ranks that share the shards; None if there is nothing to gather.
        blocks: parts of the model by name, in the order of the forward pass. A block's parameters must be read only
            while it runs, or later. Parameters outside all blocks are waited for at once. Without blocks nothing is
            overlapped. For a block that is compiled alone, give the result of ``torch.compile(block)``.
        exchange: copies weights between the ranks of ``group``; None: collectives do.

    Attributes:
        overlapped: whether gathers run at the start of the next iteration; else they run right after the update.
        sends: False starts no gather, so that the model keeps its weights; for measurements only.

    Raises:
        ValueError: a block is a container that never runs itself.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        group: dist.ProcessGroup | None,
        blocks: Sequence[tuple[str, nn.Module]],
        exchange: PeerExchange | None = None,
    ) -> None:
        self._group, self._exchange = group, exchange
        self.overlapped = group is not None and bool(blocks)
        self.sends = True
        self._started = 0  # number of gathers started, in their order
        self._works: dict[int, Transfer] = {}
        self._hooks: list[RemovableHandle] = []
        self._gathers: list[_Gather] = []
        self._blocks = tuple(blocks) if group is not None else ()
        if group is None:
            return
        blocks_of: dict[int, set[int]] = {}
        for block, (name, module) in enumerate(blocks):
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise ValueError(f"block {name!r} is a {type(module).__name__}, which never runs: name its members")
            for parameter in module.parameters():
                blocks_of.setdefault(id(parameter), set()).add(block)
        found = [
            _gather_of(buffer, bucket, blocks_of, None if exchange is None else exchange.pieces(number, buffer, bucket))
            for number, buffer in enumerate(buffers)
            for bucket in buffer.buckets
        ]
        self._gathers = sorted(found, key=lambda gather: min(gather.readers))
        self._started = len(self._gathers)
        for block, (_, module) in enumerate(blocks):
            self._hooks.append(self._register(block, module))

    def begin(self) -> None:
        """Start an iteration: if gathers are overlapped, start the first; blocks that run start the others.

        Raises:
            RuntimeError: a block was compiled in place, so the hook that waits would be compiled with it.
        """
        for name, module in self._blocks:
            if module._compiled_call_impl is not None:
                raise RuntimeError(
                    f"block {name!r} was compiled in place: its weights cannot be waited for; use what "
                    "torch.compile(block) returns, in the model and in blocks"
                )
        if self.overlapped:
            self.join()  # an aborted iteration may have left some, which other ranks may have started already
            self._started = 0
            self._start(AHEAD - 1)
            self._wait_for(-1)

    def start_all(self) -> None:
        """Start all remaining gathers. Call this before other collectives of the group."""
        self._start(len(self._blocks))

    def join(self) -> None:
        """Start all remaining gathers; wait (a GPU's stream, not the host) for those that no block has waited for."""
        self.start_all()
        for at in list(self._works):
            self._works.pop(at).wait()

    def gather(self) -> None:
        """Gather everything and wait for it; on a GPU the current stream waits."""
        self.join()
        self._started = 0
        if self._exchange is not None:
            self._exchange.meet()  # the other ranks have updated their shards
        self.join()
        if self._exchange is not None:
            self._exchange.meet().wait()  # they have read this one's, which may change from now on

    def close(self) -> None:
        """Remove the hooks from the blocks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _register(self, block: int, module: nn.Module) -> RemovableHandle:
        def enter(*_: object) -> None:
            self._start(block + AHEAD)
            self._wait_for(block)

        return module.register_forward_pre_hook(enter)

    def _start(self, block: int) -> None:
        """Start the remaining gathers that ``block`` or an earlier block reads first."""
        if not self.sends:
            return
        while self._started < len(self._gathers) and min(self._gathers[self._started].readers) <= block:
            gather = self._gathers[self._started]
            self._works[self._started] = self._launch(gather)
            self._started += 1

    def _launch(self, gather: _Gather) -> Transfer:
        if self._exchange is not None and gather.pieces is not None:
            return self._exchange.copy(gather.pieces.pulls)
        work = dist.all_gather_into_tensor(gather.weights, gather.piece, group=self._group, async_op=True)
        assert work is not None  # this rank is a member of the group
        return work

    def _wait_for(self, block: int) -> None:
        for at in [at for at in self._works if block in self._gathers[at].readers]:
            self._works.pop(at).wait()


def sum_in_order(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum a small tensor in place over the ranks of ``group``, in their order; do nothing without a group.

    An all-reduce may add in another order on another node, and then nodes that hold the same shards would diverge.
    """
    if group is None:
        return
    gathered = values.new_empty(group.size() * values.numel())
    dist.all_gather_into_tensor(gathered, values.flatten(), group=group)
    values.copy_(gathered.view(-1, *values.shape).sum(0))


def wait_for_weights(block: nn.Module) -> None:
    """Wait for the weights of a block if other code reads them before the block runs.

    Like the block itself, this starts gathers of later blocks, so all ranks must call it in the same order.
    """
    for hook in block._forward_pre_hooks.values():
        hook(block, ())


def _gather_of(
    buffer: FlatBuffer, bucket: Bucket, blocks_of: Mapping[int, set[int]], pieces: PeerPieces | None
) -> _Gather:
    readers = [blocks_of.get(id(segment.parameter), {-1}) for segment in bucket.segments]
    weights = buffer.parameters[bucket.start : bucket.stop]
    return _Gather(buffer.shard.parameters[bucket.in_shard], weights, frozenset().union(*readers), pieces)
