"""Exponential moving averages of the weights, which replace the weights in an evaluation.

After every update, with w the fp32 weight and d the decay:

    a <- d * a + (1 - d) * w

a starts as w, without bias correction. A rank averages only the weights that it updates, so work and memory are
sharded like those of the optimizer. Multi-tensor kernels average in the same pass that updates the weights; they use
the same formula (that of ``torch.lerp``), so the bits do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.optim import state
from common.optim.buffers import FlatBuffer
from common.optim.optimizer import Optimizer

KIND = "average"
"""Name of the averages in the state."""


class WeightAverage:
    """Updater (:class:`common.optim.updater.Updater`) that averages the weights of an optimizer.

    It must come after the optimizer in the updaters of a step. The averages start as the current weights, so load
    these before building it.

    Args:
        optimizer: owner of the weights. Its fp32 masters are averaged where parameters are half precision.
        decay: d, at least 0 and below 1.
        copies_first: whether the first update sets a to w, as averaging of the weights in ``torch.optim.swa_utils``
            does. The number of updates is then part of the state.

    Attributes:
        loss_scale: always None, because no gradient is read.

    Raises:
        ValueError: the decay is out of its range.
    """

    loss_scale = None

    def __init__(self, optimizer: Optimizer, decay: float, *, copies_first: bool = False) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay={decay}: the average of the weights keeps at least 0 and less than 1 of itself")
        self._buffers, self._plan = optimizer.buffers, optimizer.plan
        # Adding 0.0 turns -0.0 into 0.0. An update that is not allowed could otherwise change the sign bit.
        self._averages = [buffer.shard.read_masters(slice(None)) + 0.0 for buffer in self._buffers]
        device = self._averages[0].device
        self._shares = [torch.full((), 1.0 - decay, dtype=average.dtype, device=device) for average in self._averages]
        self._later_share = self._shares[0].clone()
        self._updates = torch.zeros((), dtype=torch.int64, device=device) if copies_first else None
        self._in_update = optimizer.average_into(self._averages, self._shares[0])
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._whole: list[Tensor] = []

    def begin(self) -> None:
        """Do nothing: there are no gradients."""

    def arm(self, part: nn.Module | None = None) -> None:
        """Do nothing: there is no reduction."""

    def collect(self) -> None:
        """Do nothing: micro-batches are not used."""

    def measure(self) -> Tensor:
        """Return false (0-d bool): there is no gradient that could overflow. Set the share of the next update."""
        if self._updates is not None:
            for share in self._shares:
                share.copy_(torch.where(self._updates == 0, 1.0, self._later_share))
        return self._never

    @torch.no_grad()
    def write(self, allowed: Tensor) -> None:
        """Add the updated weights to the averages, which do not change where ``allowed`` (0-d bool) is false."""
        if self._updates is not None:
            self._updates.add_(allowed)
        if self._in_update:
            return
        for buffer, average, share in zip(self._buffers, self._averages, self._shares, strict=True):
            masters = buffer.shard.read_masters(slice(None))
            average.lerp_(masters, share * allowed)  # one pass; a share of 0 changes nothing

    def materialize(self) -> None:
        """Do nothing: the optimizer updates the model's weights, and :meth:`weights` gathers the averages."""

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, in the parameters' dtypes, for an evaluation.

        Collective over the ranks that share shards. Every call returns and overwrites the same memory, which is
        separate from the parameters. Nothing waits for the device.
        """
        found: dict[str, Tensor] = {}
        for buffer, whole in zip(self._buffers, self._filled(), strict=True):
            for segment in buffer.segments:
                found[segment.name] = buffer.view(whole, segment)
        return found

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Return the flat averages of this rank's shards, and the number of updates if the first one copies."""
        names = [str(buffer.dtype).removeprefix("torch.") for buffer in self._buffers]
        averages = [(f"{KIND}.{name}", average) for name, average in zip(names, self._averages, strict=True)]
        return [*averages, *self._counts().items()]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return full averages in fp32 by parameter name, on the CPU; empty on ranks that do not write the state.

        If the first update copies, the number of updates is in it too. Collective over the ranks that share shards.
        """
        plan = self._plan
        if not plan.near_writer:
            return {}
        averages = state.collect(self._buffers, {KIND: self._averages}, plan.group, plan.ranks, plan.writes)
        if not plan.writes:
            return {}
        return {**{name: count.cpu().clone() for name, count in self._counts().items()}, **averages}

    @torch.no_grad()
    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, which may come from any number of ranks.

        Raises:
            CheckpointError: an entry is missing, unexpected, or has another shape. Nothing is changed then.
        """
        named = {name: entries for name, entries in loaded.items() if isinstance(entries, Mapping)}
        counts = self._counts()
        state.complain(
            {
                "missing": [name for name in counts if not isinstance(loaded.get(name), Tensor)],
                "unexpected": [name for name in loaded if name not in named and name not in counts],
            }
        )
        kinds = {KIND: self._averages}
        state.check(self._buffers, kinds, named)
        for name, count in counts.items():
            count.copy_(loaded[name])
        state.distribute(self._buffers, kinds, named)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Return an empty dict: there are no metrics."""
        return {}

    def _counts(self) -> dict[str, Tensor]:
        return {} if self._updates is None else {"updates": self._updates}

    def _filled(self) -> list[Tensor]:
        """Return the averages of all ranks, in the layout and dtype of each flat buffer."""
        if not self._whole:
            self._whole = [self._new_whole(*of) for of in zip(self._buffers, self._averages, strict=True)]
        for buffer, average, whole in zip(self._buffers, self._averages, self._whole, strict=True):
            if whole is average:
                continue
            if buffer.is_whole:
                whole.copy_(average)
                continue
            own = average.to(whole.dtype)
            for bucket in buffer.buckets:
                gathered = whole[bucket.start : bucket.stop]
                dist.all_gather_into_tensor(gathered, own[bucket.in_shard], group=self._plan.group)
        return self._whole

    @staticmethod
    def _new_whole(buffer: FlatBuffer, average: Tensor) -> Tensor:
        """Return the buffer for a whole average; the average itself if it is whole and has the parameters' dtype."""
        if buffer.is_whole and average.dtype == buffer.dtype:
            return average
        return torch.empty_like(buffer.parameters)
