"""Runs of neighbouring fragments of one group, which update rules in plain PyTorch update together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.optim.rules import Binding, GroupSettings
from common.optim.shard import Fragment, Shard


@dataclass(frozen=True)
class Run:
    """Neighbouring fragments of one group, which one chain of flat operations updates.

    A run includes padding, which is zero and stays zero.

    Attributes:
        shard: the shard that contains the fragments.
        part: slice from the start of the first fragment to the stop of the last.
        settings: settings of the group.
        fragments: at least one, in order.
        states: the slice ``part`` of each state tensor, in the order of the update's ``kinds``.
    """

    shard: Shard
    part: slice
    settings: GroupSettings
    fragments: tuple[Fragment, ...]
    states: tuple[Tensor, ...]

    @property
    def group(self) -> int:
        """Index of the parameter group."""
        return self.fragments[0].group

    @property
    def masters(self) -> Tensor:
        """The weights to update, in fp32 or fp64."""
        return self.shard.read_masters(self.part)

    def gradients(self, grad_factor: Tensor) -> Tensor:
        """Return the mean gradients in the dtype of the masters, times ``grad_factor`` (0-d)."""
        gradients = self.shard.gradients[self.part].to(self.shard.wide)
        return gradients * (self.settings.grad_multiplier * grad_factor)

    def weights_for_norms(self, of_model: bool) -> Tensor:
        """Return the weights for the norm: the model's weights with ``of_model``, else the masters."""
        return self.shard.parameters[self.part] if of_model else self.masters

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of ``flat`` for each fragment, without padding. ``flat`` starts at the start of the run."""
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
    """Return the runs of all shards, in order.

    Args:
        states: state tensors, by kind and then by shard.
        alone: put each fragment with a trust ratio in a separate run.
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
