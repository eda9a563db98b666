"""Averages of the weights, updated beside the optimizer and evaluated in their place.

After every update, with w the float32 weight and d the decay:

    a <- d * a + (1 - d) * w

from a = w at the start, without correction of the first updates. A rank averages the weights that it updates and no
others, so that the work and the memory are sharded as the optimizer's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.optim import state
from common.optim.optimizer import Optimizer
from common.optim.partition import Partition

KIND = "average"
"""What the averages are called among the state."""


class WeightAverage:
    """The updater (:class:`common.optim.updater.Updater`) that averages the weights of an optimizer.

    It writes after the optimizer, so it stands behind it among the updaters of a step. Building it takes the weights as
    they are: load them before.

    Args:
        optimizer: whose weights are averaged: the masters of half parameters, the parameters themselves otherwise.
        decay: d, at least 0 and below 1.

    Attributes:
        loss_scale: None: no gradient is read.

    Raises:
        ValueError: the decay is out of its range.
    """

    loss_scale = None

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay={decay}: the average of the weights keeps at least 0 and less than 1 of itself")
        self._partitions, self._plan = optimizer.partitions, optimizer.plan
        # No zero has a minus: writing nothing would take it away.
        self._averages = [partition.shard.read_masters(slice(None)) + 0.0 for partition in self._partitions]
        device = self._averages[0].device
        self._shares = [torch.full((), 1.0 - decay, dtype=average.dtype, device=device) for average in self._averages]
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._whole: list[Tensor] = []

    def begin(self) -> None:
        """Nothing: there are no gradients."""

    def arm(self, part: nn.Module | None = None) -> None:
        """Nothing is reduced."""

    def collect(self) -> None:
        """Nothing comes with a micro-batch."""

    def measure(self) -> Tensor:
        """Nothing is measured: never an overflow (0-d bool)."""
        return self._never

    @torch.no_grad()
    def write(self, allowed: Tensor) -> None:
        """Take the weights of the update into the averages, which stay where ``allowed`` (0-d bool) is false."""
        for partition, average, share in zip(self._partitions, self._averages, self._shares, strict=True):
            masters = partition.shard.read_masters(slice(None))
            average.lerp_(masters, share * allowed)  # one pass; a share of 0 moves nothing

    def materialize(self) -> None:
        """Nothing: the model's weights are the optimizer's; :meth:`weights` gathers the averages."""

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The averages in the parameters' dtypes by name, for an evaluation. Collective over the ranks that share.

        Their memory is not the parameters', and the same at every call, which updates it; nothing waits for the device.
        """
        found: dict[str, Tensor] = {}
        for partition, whole in zip(self._partitions, self._filled(), strict=True):
            for segment in partition.buffer.segments:
                found[segment.name] = partition.buffer.view(whole, segment)
        return found

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """The flat averages of this rank's shards."""
        names = [str(partition.buffer.dtype).removeprefix("torch.") for partition in self._partitions]
        return [(f"{KIND}.{name}", average) for name, average in zip(names, self._averages, strict=True)]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Full averages in float32 by parameter name, on the CPU of the ranks that write them; on others nothing.

        Collective over the ranks that share shards.
        """
        plan = self._plan
        if not plan.near_writer:
            return {}
        return dict(state.collect(self._partitions, {KIND: self._averages}, plan.group, plan.ranks, plan.writes))

    @torch.no_grad()
    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on any number of ranks.

        Raises:
            CheckpointError: an entry is missing, unexpected, or has another shape. Nothing is changed then.
        """
        unknown = [name for name, entries in loaded.items() if not isinstance(entries, Mapping)]
        state.complain({"unexpected": unknown})
        kinds = {KIND: self._averages}
        state.check(self._partitions, kinds, loaded)
        state.distribute(self._partitions, kinds, loaded)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Nothing to report."""
        return {}

    def _filled(self) -> list[Tensor]:
        """The averages of all ranks in the layout and dtype of each flat buffer."""
        if not self._whole:
            self._whole = [self._room(*of) for of in zip(self._partitions, self._averages, strict=True)]
        for partition, average, whole in zip(self._partitions, self._averages, self._whole, strict=True):
            if whole is average:
                continue
            if partition.is_whole:
                whole.copy_(average)
                continue
            own = average.to(whole.dtype)
            for piece in partition.pieces:
                bucket = whole[piece.bucket.start : piece.bucket.stop]
                dist.all_gather_into_tensor(bucket, own[piece.place], group=self._plan.group)
        return self._whole

    @staticmethod
    def _room(partition: Partition, average: Tensor) -> Tensor:
        """Where a whole average goes: the average itself if it is whole and in the parameters' dtype."""
        if partition.is_whole and average.dtype == partition.buffer.dtype:
            return average
        return torch.empty_like(partition.buffer.parameters)
