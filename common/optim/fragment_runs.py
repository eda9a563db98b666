"""What the update rules in plain PyTorch work on: neighbouring fragments of one group, updated in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.optim.rules import Binding, GroupSettings
from common.optim.shard import Fragment, Shard


@dataclass(frozen=True)
class Run:
    """Neighbouring fragments of one group: what one chain of flat operations updates.

    Padding is part of it; it is zero and stays zero.

    Attributes:
        shard: where they lie.
        part: from the first one's start to the last one's stop.
        settings: of the group.
        fragments: in order, at least one.
        states: the run's part of the update's states, in the order of its kinds.
    """

    shard: Shard
    part: slice
    settings: GroupSettings
    fragments: tuple[Fragment, ...]
    states: tuple[Tensor, ...]

    @property
    def group(self) -> int:
        """Its number."""
        return self.fragments[0].group

    @property
    def masters(self) -> Tensor:
        """The weights that are updated."""
        return self.shard.read_masters(self.part)

    def gradients(self, grad_factor: Tensor) -> Tensor:
        """The mean gradients in the dtype of the masters, times ``grad_factor`` (0-d)."""
        gradients = self.shard.gradients[self.part].to(self.shard.wide)
        return gradients * (self.settings.grad_multiplier * grad_factor)

    def weights_for_norms(self, of_model: bool) -> Tensor:
        """The weights whose norm counts: those that the model computes with, or the masters."""
        return self.shard.parameters[self.part] if of_model else self.masters

    def views(self, flat: Tensor) -> list[Tensor]:
        """The fragments in ``flat``, a tensor that starts where the run starts."""
        first = self.part.start
        return [flat[f.start - first : f.start - first + f.numel] for f in self.fragments]

    def write(self, allowed: Tensor, weights: Tensor) -> None:
        """Set masters and parameters to ``weights`` where ``allowed`` (0-d bool) is true."""
        if self.shard.has_remainders:
            self.shard.write_masters(self.part, torch.where(allowed, weights, self.masters))
            return
        write_where(allowed, self.masters, weights)
        if self.shard.has_masters:
            write_where(allowed, self.shard.parameters[self.part], weights.to(self.shard.parameters.dtype))


def runs_of(binding: Binding, states: Sequence[Sequence[Tensor]], alone: bool) -> list[Run]:
    """The runs of all shards, in order.

    Args:
        binding: the shards and the groups.
        states: by kind and shard.
        alone: whether a fragment with a trust ratio is a run by itself.
    """
    runs: list[Run] = []
    for index, shard in enumerate(binding.shards):
        pieces: list[list[Fragment]] = []
        for fragment in shard.fragments:
            last = pieces[-1][-1] if pieces else None
            joined = last is not None and last.group == fragment.group and last.stop == fragment.start
            if joined and not (alone and binding.settings[fragment.group].trust_ratio):
                pieces[-1].append(fragment)
            else:
                pieces.append([fragment])
        for piece in pieces:
            part = slice(piece[0].start, piece[-1].stop)
            own = tuple(flats[index][part] for flats in states)
            runs.append(Run(shard, part, binding.settings[piece[0].group], tuple(piece), own))
    return runs


def note_overflow(shards: Sequence[Shard], stats: Tensor) -> None:
    """Make ``stats[0]`` positive if a gradient is not finite."""
    for shard in shards:
        stats[0] += ~torch.isfinite(shard.gradients).all()


def write_where(allowed: Tensor, target: Tensor, value: Tensor) -> None:
    """Set ``target`` to ``value`` where ``allowed`` (0-d bool) is true; otherwise leave every bit as it is."""
    target.copy_(torch.where(allowed, value, target))
