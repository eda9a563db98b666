"""Sum gradients over replicas, bucket by bucket, while the backward pass still runs.

A bucket is a contiguous slice of a flat gradient buffer, so nothing is copied. Always a sum, never an average: the
factor is applied once in the update, and summing over ranks then equals accumulating over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from common.optim.flat import FlatBuffer, Segment


@dataclass(frozen=True)
class Bucket:
    """One slice of a flat gradient buffer that is reduced in one collective.

    Attributes:
        gradients: 1-d view of the flat gradient buffer.
        segments: the parameters in it.
        process_group: the ranks to sum over.
        readiness: share of its group's parameters that the backward pass goes through before the bucket is complete.
    """

    gradients: Tensor
    segments: tuple[Segment, ...]
    process_group: dist.ProcessGroup
    readiness: float


class GradientReducer:
    """Sums the gradients of flat buffers over process groups.

    Once armed, a bucket is reduced as soon as the gradients of all its parameters are final. Buckets start in one fixed
    order, the same on every rank even where some ranks leave parameters unused. Inside CUDA graph capture the
    collectives are captured with the backward pass.

    Args:
        buffers: the flat buffers.
        process_groups: per parameter group the ranks to sum over; None where there is nothing to sum.
        bucket_bytes: a bucket is closed when it holds at least this many bytes.
        overlap: False reduces everything in :meth:`finish`.

    Attributes:
        buckets: in the order in which they are reduced.
        launched: how many of them have been launched in this iteration.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        process_groups: Sequence[dist.ProcessGroup | None],
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket has a positive size")
        self.buckets = _plan_buckets(buffers, process_groups, bucket_bytes)
        self._overlap = overlap
        self._bucket_of = {s.name: i for i, bucket in enumerate(self.buckets) for s in bucket.segments}
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._missing: list[set[str]] = []
        self.launched = 0
        self._works: list[dist.Work] = []
        self.begin()

    def begin(self) -> None:
        """Start an iteration: nothing has been reduced."""
        self._armed = False
        self._missing = [{s.name for s in bucket.segments} for bucket in self.buckets]
        self.launched = 0
        self._works = []

    def arm(self) -> None:
        """Let the next backward pass launch buckets: it is the last of the iteration.

        The first call registers the hooks, on the stream that the backward passes use.
        """
        if not self._overlap:
            return
        if not self._hooks:
            for bucket in self.buckets:
                for segment in bucket.segments:
                    self._hooks.append(self._register(segment))
        self._armed = True

    def finish(self) -> None:
        """Launch what is left (parameters without a gradient in this iteration) and wait for all buckets.

        On a GPU it is the current stream that waits, not the host.
        """
        self._armed = False
        while self.launched < len(self.buckets):
            self._launch()
        for work in self._works:
            work.wait()
        self._works = []

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._armed = False

    def _register(self, segment: Segment) -> RemovableHandle:
        name = segment.name
        return segment.parameter.register_post_accumulate_grad_hook(lambda _: self._on_gradient(name))

    def _on_gradient(self, name: str) -> None:
        if not self._armed:
            return
        missing = self._missing[self._bucket_of[name]]
        if name not in missing:
            raise RuntimeError(
                f"parameter {name!r} received a second gradient after arm(): arm the optimizer before the last "
                "backward pass of the iteration only, or use overlap=False"
            )
        missing.remove(name)
        while self.launched < len(self.buckets) and not self._missing[self.launched]:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        self.launched += 1
        work = dist.all_reduce(bucket.gradients, op=dist.ReduceOp.SUM, group=bucket.process_group, async_op=True)
        assert work is not None  # this rank is a member of the group
        self._works.append(work)


def _plan_buckets(
    buffers: Sequence[FlatBuffer], process_groups: Sequence[dist.ProcessGroup | None], bucket_bytes: int
) -> list[Bucket]:
    """Cut every group's part of every buffer into buckets, from its end; order them by when they become complete.

    Groups interleave in the model (weights and biases of the same layers), so a bucket's place is estimated from
    where in its group its first parameter stands: backward passes reach that one last.
    """
    buckets = []
    for buffer in buffers:
        for index, process_group in enumerate(process_groups):
            members = [s for s in buffer.segments if s.group == index]
            if process_group is None or not members:
                continue
            last = len(members)
            for first in range(len(members) - 1, -1, -1):
                start, stop = members[first].start, members[last - 1].stop
                if (stop - start) * buffer.dtype.itemsize < bucket_bytes and first > 0:
                    continue
                readiness = 1.0 - first / len(members)
                inside = tuple(members[first:last])
                buckets.append(Bucket(buffer.gradients[start:stop], inside, process_group, readiness))
                last = first
    return sorted(buckets, key=lambda bucket: bucket.readiness)
