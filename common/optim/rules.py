"""Interfaces that all update rules share, and the runs of elements that rules in plain PyTorch update together.

A Rule holds only hyperparameters. It reduces to a Formula, which several rules may share (LARS and SGD, LAMB and
Adam) and which lists its implementations. Bound to shards it becomes an Update with two methods: ``measure`` reads
gradients and computes norms and the overflow flag, ``apply`` writes. Between the two, the training step decides on
the device whether to write, and the optimizer computes the factor for all gradients.

A new rule needs a Rule, a Formula, an Update for each implementation, and cases in :mod:`common.optim.update_cases`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.ops.operation import Operation, OperationRequest
from common.ops.triton_support import no_triton
from common.optim.buffers import Fragment, Shard

SumOverShards = Callable[[Tensor], None]
"""Sums a small tensor in place over the ranks that share the shards, in a fixed order; does nothing on one rank."""


@dataclass(frozen=True)
class GroupSettings:
    """Settings of a parameter group for a rule.

    Attributes:
        grad_multiplier: factor that turns the gradient in the shard into the mean over the global batch.
        norm_share: weight of the group's squares in ``stats[1]``: 1 / (number of ranks that hold the group
            redundantly).
    """

    grad_multiplier: float
    weight_decay: float
    trust_ratio: bool
    learning_rate_in_momentum: bool
    norm_share: float = 1.0


@dataclass(frozen=True)
class Binding:
    """Shards and settings to which a rule is bound.

    Attributes:
        shards: this rank's shards, one for each dtype.
        settings: one entry for each parameter group.
        tensors: number of tensors on all ranks that share the shards; ``Fragment.tensor`` is below it.
        sum_over_shards: completes norms of tensors. Every rank must call it equally often.
    """

    shards: Sequence[Shard]
    settings: Sequence[GroupSettings]
    tensors: int
    sum_over_shards: SumOverShards


class Update(ABC):
    """A rule bound to shards, with its state. Nothing in it waits for the device.

    Attributes:
        kinds: names of the state, in the order in which implementations use it.
        states: for each kind, one flat tensor per shard.
    """

    implementation: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, binding: Binding) -> None:
        shards = binding.shards
        self.states: dict[str, list[Tensor]] = {kind: [s.new_state() for s in shards] for kind in self.kinds}
        self._shards = shards
        self._tensors = binding.tensors
        self._sum_over_shards = binding.sum_over_shards
        self._any_trust = any(group.trust_ratio for group in binding.settings)
        widest = torch.float64 if any(s.master_dtype == torch.float64 for s in shards) else torch.float32
        # For tensors with a trust ratio, sums of squares of weights (row 0) and of gradients or directions (row 1). One
        # tensor, so that one collective sums both.
        self._squares = torch.zeros((2, binding.tensors), dtype=widest, device=shards[0].masters.device)

    @abstractmethod
    def measure(self, stats: Tensor) -> None:
        """Read gradients and weights.

        Args:
            stats: [2] statistics of the gradients, fp32, or fp64 with fp64 parameters; zero before. Make ``stats[0]``
                positive if a gradient of this rank's shards is not finite. Add to ``stats[1]`` the sum of squares of
                gradient times ``grad_multiplier`` over this rank's shards, with each group's squares times its
                ``norm_share``.
        """

    @abstractmethod
    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """Update weights, masters and state if ``write`` is true; otherwise leave every bit as it is.

        Args:
            rates_G: the learning rate of each parameter group, fp32.
            step: 0-d int64, number of updates before this one.
            grad_factor: 0-d, dtype of ``stats``; factor on every gradient (clipping, loss scale).
            write: 0-d bool.
        """

    def average_into(self, averages: Sequence[Tensor], share: Tensor) -> bool:
        """Let :meth:`apply` also move averages towards the new weights, in the same pass over memory.

        Args:
            averages: one flat fp32 tensor per shard.
            share: weight of the new weights in the averages, 0-d fp32, which every update reads.

        Returns:
            Whether it will. Default: no, the caller averages.
        """
        return False

    def _complete_squares(self) -> None:
        """Sum the squares over the ranks that share the shards, if there are trust ratios."""
        if self._any_trust:
            self._sum_over_shards(self._squares)


class Formula(ABC):
    """Hyperparameters to which several rules reduce.

    Attributes:
        takes_remainders: whether all its implementations support masters that are kept as remainders, in groups
            without trust ratio.
    """

    takes_remainders: ClassVar[bool] = False

    @abstractmethod
    def operation(self) -> Operation:
        """Return the operation that computes it. Its implementations map (formula, Binding) to an Update."""


class Rule(ABC):
    """Hyperparameters of an update rule.

    Attributes:
        instead: for a rule without trust ratios, the name of a rule that has them; otherwise empty.
    """

    instead: ClassVar[str] = ""

    @abstractmethod
    def formula(self) -> Formula:
        """Return the formula to which the rule reduces."""

    def bind(self, binding: Binding, implementation: str) -> Update:
        """Return an Update for the shards of ``binding``, with newly allocated state.

        Args:
            implementation: name of an implementation, or ``auto``.

        Raises:
            ValueError: a group needs a trust ratio that the rule does not have, or the rule does not support
                remainders.
            UnsupportedImplementation: the implementation does not exist or does not support these shards.
        """
        trust = any(group.trust_ratio for group in binding.settings)
        if self.instead and trust:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no trust ratio; use {self.instead} for parameter groups with trust_ratio=True"
            )
        shards = binding.shards
        dtypes = [shard.parameters.dtype for shard in shards]
        widest = torch.float64 if torch.float64 in dtypes else dtypes[0]  # the kernels refuse float64 in any shard
        request = OperationRequest(shards[0].parameters.device, widest)
        formula = self.formula()
        if any(shard.has_remainders for shard in shards) and (trust or not formula.takes_remainders):
            raise ValueError(
                f"{type(self).__name__}: masters are kept as remainders by Adam and AdamW only; use "
                "optimizer.masters=fp32"
            )
        chosen = formula.operation().select(implementation, request).function
        update: Update = chosen(formula, binding)
        return update


def triton_unsupported(request: OperationRequest) -> str | None:
    """Return why the multi-tensor kernels of the update rules do not support ``request``; None if they do."""
    if request.dtype == torch.float64:
        return "the kernel computes in float32, the parameters are float64"
    return no_triton(request.device)


@dataclass(frozen=True)
class Run:
    """Neighbouring fragments of one group, which one chain of flat operations updates.

    A run includes padding, which is zero and stays zero.

    Attributes:
        shard: the shard that contains the fragments.
        part: slice from the start of the first fragment to the stop of the last.
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
        gradients = self.shard.gradients[self.part].to(self.shard.master_dtype)
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
