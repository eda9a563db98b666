"""Update rules on shards: what all of them share.

A Rule holds hyperparameters only. It comes down to a Formula, which several rules may share (LARS and SGD, LAMB and
Adam) and which knows its implementations. Bound to shards it becomes an Update, which works in two halves: ``measure``
reads what the update depends on (norms, and whether all gradients are finite), ``apply`` writes. Between the two the
training step decides on the device whether anything may be written, and the optimizer what all gradients are multiplied
with.

A new rule is a Rule, a Formula and an Update for each implementation: its arithmetic, and the names of its states. Its
cases are in :mod:`common.optim.update_cases`.
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
from common.optim.shard import Shard

SumOverShards = Callable[[Tensor], None]
"""Sums a small tensor in place over the ranks that share the shards, in a fixed order; nothing on one rank."""


@dataclass(frozen=True)
class GroupSettings:
    """What a rule needs to know of a parameter group.

    Attributes:
        grad_multiplier: turns the gradient in the shard into the mean over the global batch.
        weight_decay, trust_ratio, learning_rate_in_momentum: see ``ParameterGroup``.
        norm_share: what the group's squares count in ``stats[1]``: 1 over the ranks that hold the group redundantly.
    """

    grad_multiplier: float
    weight_decay: float
    trust_ratio: bool
    learning_rate_in_momentum: bool
    norm_share: float = 1.0


@dataclass(frozen=True)
class Binding:
    """What a rule is bound to.

    Attributes:
        shards: this rank's, one for each dtype.
        settings: one entry for each parameter group.
        tensors: how many tensors there are on all ranks that share the shards; ``Fragment.tensor`` is below it.
        sum_over_shards: for norms of tensors; every rank calls it equally often.
    """

    shards: Sequence[Shard]
    settings: Sequence[GroupSettings]
    tensors: int
    sum_over_shards: SumOverShards


class Update(ABC):
    """A rule bound to shards, with its state. Nothing in it waits for the device.

    Attributes:
        implementation: the name of the implementation.
        kinds: the names of the state, in the order in which implementations use it.
        states: for each kind one flat tensor per shard.
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
        widest = torch.float64 if any(s.wide == torch.float64 for s in shards) else torch.float32
        # Sums of squares by tensor with a trust ratio: of weights, and of what the rule compares them with. One tensor,
        # so that one collective sums both.
        self._squares = torch.zeros((2, binding.tensors), dtype=widest, device=shards[0].masters.device)

    @abstractmethod
    def measure(self, stats: Tensor) -> None:
        """Read gradients and weights.

        Args:
            stats: [2] statistics of the gradients, float32, float64 with parameters of that dtype; zero before.
                ``stats[0]`` is made positive if a gradient of this rank's shards is not finite; ``stats[1]`` becomes
                the sum of squares of gradient times ``grad_multiplier`` over this rank's shards, each group's times its
                ``norm_share``.
        """

    @abstractmethod
    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """Update weights, masters and state if ``write`` is true; otherwise leave every bit as it is.

        Args:
            rates_G: the learning rate of each parameter group, float32.
            step: 0-d int64, updates done before this one.
            grad_factor: 0-d, dtype of ``stats``; every gradient is multiplied with it (clipping, loss scale).
            write: 0-d bool.
        """

    def _complete_squares(self) -> None:
        """Add up the squares of the ranks that share the shards, if there are trust ratios."""
        if self._any_trust:
            self._sum_over_shards(self._squares)


class Formula(ABC):
    """Hyperparameters that several rules come down to.

    Attributes:
        takes_remainders: whether all its implementations update masters that are kept as remainders, where no group has
            a trust ratio.
    """

    takes_remainders: ClassVar[bool] = False

    @abstractmethod
    def operation(self) -> Operation:
        """The operation that computes it: its implementations map (formula, Binding) to an Update."""


class Rule(ABC):
    """Hyperparameters of an update rule.

    Attributes:
        instead: the rule that has trust ratios, for one that has none; otherwise empty.
    """

    instead: ClassVar[str] = ""

    @abstractmethod
    def formula(self) -> Formula:
        """What the rule comes down to."""

    def bind(
        self,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
        implementation: str,
    ) -> Update:
        """Allocate the state for ``shards``.

        Args:
            shards, settings, tensors, sum_over_shards: see :class:`Binding`.
            implementation: ``auto`` or a name.

        Raises:
            ValueError: a group asks for a trust ratio that the rule does not have.
            UnsupportedImplementation: there is no such implementation, or it cannot serve these shards.
        """
        if self.instead and any(group.trust_ratio for group in settings):
            name = type(self).__name__
            raise ValueError(
                f"{name} has no trust ratio; use {self.instead} for parameter groups with trust_ratio=True"
            )
        dtypes = [shard.parameters.dtype for shard in shards]
        widest = torch.float64 if torch.float64 in dtypes else dtypes[0]  # the kernels refuse float64 in any shard
        request = OperationRequest(shards[0].parameters.device, widest)
        formula = self.formula()
        trust = any(group.trust_ratio for group in settings)
        if any(shard.has_remainders for shard in shards) and (trust or not formula.takes_remainders):
            raise ValueError(
                f"{type(self).__name__}: masters are kept as remainders by Adam and AdamW only; use "
                "optimizer.masters=fp32"
            )
        chosen = formula.operation().select(implementation, request).function
        update: Update = chosen(formula, Binding(shards, settings, tensors, sum_over_shards))
        return update


def triton_unsupported(request: OperationRequest) -> str | None:
    """Why the multi-tensor kernels of the update rules cannot serve ``request``; None if they can."""
    if request.dtype == torch.float64:
        return "the kernel computes in float32, the parameters are float64"
    return no_triton(request.device)
