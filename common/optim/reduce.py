"""Sum gradients over replicas, bucket by bucket, while the backward pass still runs.

A bucket is a contiguous slice of a flat gradient buffer, so nothing is copied. Gradients are summed, never averaged:
the update applies the factor once, and summing over ranks then equals accumulating over micro-batches.

- Without shards every rank receives the whole sum (all-reduce).
- With shards each rank needs only its piece of each bucket: a reduce-scatter over the ranks that share the shards,
  then an all-reduce of the pieces over ranks that hold the same shard, if there are several.
- ``all_reduce=True`` instead sums whole buckets over all ranks at once and keeps the piece, which suits networks
  whose switches reduce.

A sum in fp16 may overflow although its terms do not. ``predivide`` of :class:`common.optim.precision.LossScale`
divides all gradients beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.ops.device_clock import milliseconds, stamp
from common.optim.flat import Bucket, Segment
from common.optim.partition import Partition


@dataclass(frozen=True)
class Route:
    """The ranks over which the gradients of one parameter group are summed. None means this rank alone.

    If gradients were summed over some ranks before, so that these have the same gradients, no group has two of them.

    Attributes:
        shard: ranks that share the shards.
        across: ranks that hold the same shard.
        everyone: both together.
        late: reduce these gradients after all others, because some ranks have them early and others at the end.
        pieces: number of pieces of a bucket that this rank receives from a scatter over ``shard``, of which it keeps
            one. There is one for each rank that shares shards with it and had the same gradients before.
    """

    shard: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    late: bool = False
    pieces: int = 1


@dataclass(frozen=True)
class _Reduction:
    """One bucket and the tensors of its reduction.

    Attributes:
        gradients: the whole bucket.
        own: this rank's piece of ``gradients``.
        piece: destination of the sum of this rank's piece; None: in place.
        scattered: output of the scatter: ``piece``, or several pieces of ``gradients``.
        route: ranks to sum over.
    """

    bucket: Bucket
    gradients: Tensor
    own: Tensor
    piece: Tensor | None
    scattered: Tensor
    route: Route


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

    Attributes:
        buckets: number of buckets that are reduced in an iteration.
        launched: number of buckets launched so far in this iteration.
        sends: False launches no collective, so that every rank keeps its local gradients; for measurements only.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        routes: Sequence[Route],
        overlap: bool,
        all_reduce: bool = False,
    ) -> None:
        self._reductions = _plan(partitions, routes)
        self._all_reduce = all_reduce
        self._overlap = overlap
        kept = [(r.piece, r.own) for r in self._reductions if r.piece is not None] if all_reduce else []
        self._kept = [piece for piece, _ in kept], [own for _, own in kept]
        self._bucket_of = {s.name: i for i, r in enumerate(self._reductions) for s in r.bucket.segments}
        device = partitions[0].buffer.device
        staged = not all_reduce and any(r.piece is not None and _in_stages(r.route) for r in self._reductions)
        self._side = torch.cuda.Stream(device) if staged and device.type == "cuda" else None
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._armed_parameters: set[int] = set()
        self._missing: list[set[str]] = []
        self.buckets = len(self._reductions)
        self.launched = 0
        self.sends = True
        self._works: list[dist.Work] = []
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

    def finish(self) -> None:
        """Launch the remaining buckets (with parameters that got no gradient) and wait for all.

        On a GPU the current stream waits, not the host.
        """
        self._armed = False
        self._armed_parameters = set()
        if not self._reductions:
            return
        stamp(self._moments[0])
        while self.launched < self.buckets:
            self._launch()
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

    def _launch(self) -> None:
        reduction = self._reductions[self.launched]
        self.launched += 1
        if not self.sends:
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


def _plan(partitions: Sequence[Partition], routes: Sequence[Route]) -> list[_Reduction]:
    """Return all reductions, in the estimated order in which the backward pass completes their buckets.

    Groups interleave in the model (weights and biases of the same layers), so the position of a bucket is estimated
    from the position of its first parameter within its group. Backward passes reach that parameter last.
    """
    reductions = []
    for partition in partitions:
        for piece in reversed(partition.pieces):
            bucket = piece.bucket
            route = routes[bucket.group]
            if route.everyone is None and partition.is_whole:
                continue
            flat = partition.buffer.gradients
            target = None if partition.is_whole else partition.shard.gradients[piece.place]
            values, own = flat[bucket.start : bucket.stop], flat[piece.inside]
            scattered = own if target is None else target
            if route.pieces > 1:
                size = own.numel() * route.pieces
                scattered = values.split(size)[(piece.inside.start - bucket.start) // size]
            reductions.append(_Reduction(bucket, values, own, target, scattered, route))
    return sorted(reductions, key=lambda reduction: (reduction.route.late, reduction.bucket.readiness))
