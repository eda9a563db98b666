"""Update rules on shards: the protocol, and LARS and SGD.

A rule holds hyperparameters only. Bound to shards it becomes an Update, which works in two halves: ``measure`` reads
what the update depends on (norms, and whether all gradients are finite), ``apply`` writes. Between the two the
optimizer decides on the device whether anything may be written, and what all gradients are multiplied with.

With g the gradient times the group's multiplier and the factor, w the float32 weight, lambda the weight decay, mu the
momentum and lr the learning rate times the group's scale:

    tau = eta * |w| / (|g| + lambda * |w| + epsilon)    trust ratio; 1 where |w| or |g| is 0, and without trust ratio
    d   = tau * (g + lambda * w)
    learning rate in the momentum:   m <- mu * m - lr * d;  w <- w + m;       Nesterov:  w <- w + mu * m - lr * d
    outside:                         m <- mu * m + d;       w <- w - lr * m;  Nesterov:  w <- w - lr * (mu * m + d)

Both forms agree while the learning rate is constant. LARS: You, Gitman, Ginsburg, "Large Batch Training of
Convolutional Networks" (2017), algorithm 1; the first form is the MLPerf ResNet reference's, the second with LARS
equals the momentum correction of NVIDIA's submissions. Nesterov: Bengio, Boulanger-Lewandowski, Pascanu, "Advances in
Optimizing Recurrent Networks" (2013), where w is the point that the gradient was taken at; the second form is that of
``torch.optim.SGD(nesterov=True)``, the MLPerf 3D U-Net reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from common.ops.implementation import Implementation, OperationRequest, always, select
from common.ops.triton_support import no_triton
from common.optim.shard import Shard

SumOverShards = Callable[[Tensor], None]
"""Sums a small tensor in place over the ranks that share the shards, in a fixed order; nothing on one rank."""


@dataclass(frozen=True)
class GroupSettings:
    """What a rule needs to know of a parameter group.

    Attributes:
        grad_multiplier: turns the gradient in the shard into the mean over the global batch.
        weight_decay, lr_scale, trust_ratio, learning_rate_in_momentum: see ``ParameterGroup``.
        norm_share: what the group's squares count in ``report[1]``: 1 over the ranks that hold the group redundantly.
    """

    grad_multiplier: float
    weight_decay: float
    lr_scale: float
    trust_ratio: bool
    learning_rate_in_momentum: bool
    norm_share: float = 1.0


class Update(Protocol):
    """A rule bound to shards. Nothing in it waits for the device."""

    implementation: str

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """Persistent state: for each kind one flat tensor per shard, from ``Shard.new_state``."""

    def measure(self, report: Tensor) -> None:
        """Read gradients and weights.

        Args:
            report: [2] float32, float64 with parameters of that dtype; zero before. ``report[0]`` is made positive if
                a gradient of this rank's shards is not finite; ``report[1]`` becomes the sum of squares of gradient
                times ``grad_multiplier`` over this rank's shards, each group's times its ``norm_share``.
        """

    def apply(self, learning_rate: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """Update weights, masters and state if ``write`` is true; otherwise leave every bit as it is.

        Args:
            learning_rate: 0-d float32.
            step: 0-d int64, updates done before this one.
            grad_factor: 0-d, dtype of the report; every gradient is multiplied with it (clipping, loss scale).
            write: 0-d bool.
        """


class Rule(Protocol):
    """Hyperparameters of an update rule."""

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
            shards: this rank's, one for each dtype.
            settings: one entry for each parameter group.
            tensors: how many tensors there are on all ranks that share the shards; ``Fragment.tensor`` is below it.
            sum_over_shards: for norms of tensors; every rank calls it equally often.
            implementation: ``auto`` or a name.
        """


@dataclass(frozen=True)
class LARS:
    """Layer-wise adaptive rate scaling with momentum.

    Args:
        momentum: mu.
        eta: trust coefficient.
        epsilon: added to the denominator of the trust ratio.
        norm_of: take |w| of the float32 masters or of the weights that the model computes with.
    """

    momentum: float
    eta: float = 0.001
    epsilon: float = 0.0
    norm_of: Literal["master", "model"] = "master"

    def bind(
        self,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
        implementation: str,
    ) -> Update:
        """See :class:`Rule`."""
        rule = Momentum(self.momentum, False, self.eta, self.epsilon, self.norm_of == "model")
        return _bind(rule, shards, settings, tensors, sum_over_shards, implementation)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum; the weight decay is part of the gradient.

    Args:
        momentum: mu.
        nesterov: step one decay of the momentum ahead; see the formulas at the top.

    Raises:
        ValueError: Nesterov without momentum.
    """

    momentum: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"momentum={self.momentum}: Nesterov's step takes a positive momentum")

    def bind(
        self,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
        implementation: str,
    ) -> Update:
        """See :class:`Rule`.

        Raises:
            ValueError: a group asks for a trust ratio.
        """
        if any(group.trust_ratio for group in settings):
            raise ValueError("SGD has no trust ratio; use LARS for parameter groups with trust_ratio=True")
        rule = Momentum(self.momentum, self.nesterov, 0.0, 0.0, False)
        return _bind(rule, shards, settings, tensors, sum_over_shards, implementation)


@dataclass(frozen=True)
class Momentum:
    """The hyperparameters that LARS and SGD come down to; see the formulas at the top."""

    momentum: float
    nesterov: bool
    eta: float
    epsilon: float
    norm_of_model: bool


@dataclass(frozen=True)
class _Run:
    """Consecutive fragments of one group that are updated in one go; ``tensor`` is that of a trust ratio, or None."""

    shard: Shard
    momenta: Tensor
    part: slice
    settings: GroupSettings
    tensor: int | None


class TorchMomentum:
    """LARS and SGD in plain PyTorch: one chain of operations per tensor with a trust ratio, per group without."""

    implementation = "torch"

    def __init__(
        self,
        rule: Momentum,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
    ) -> None:
        self._rule = rule
        self._shards = shards
        self._sum_over_shards = sum_over_shards
        self._momenta = [shard.new_state() for shard in shards]
        self._runs = [r for shard, m in zip(shards, self._momenta, strict=True) for r in _runs(shard, m, settings)]
        self._any_trust = any(group.trust_ratio for group in settings)
        widest = torch.float64 if any(s.masters.dtype == torch.float64 for s in shards) else torch.float32
        # Sums of squares by tensor with a trust ratio: weights, gradients.
        self._squares = torch.zeros((2, tensors), dtype=widest, device=shards[0].masters.device)

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """See :class:`Update`."""
        return {"momentum": self._momenta}

    def measure(self, report: Tensor) -> None:
        """See :class:`Update`."""
        for shard in self._shards:
            report[0] += (~torch.isfinite(shard.gradients).all()).to(report.dtype)
        self._squares.zero_()
        for run in self._runs:
            squares = _sum_of_squares(run.shard.gradients[run.part]) * run.settings.grad_multiplier**2
            report[1] += squares * run.settings.norm_share
            if run.tensor is not None:
                weights = run.shard.parameters if self._rule.norm_of_model else run.shard.masters
                self._squares[0, run.tensor] = _sum_of_squares(weights[run.part])
                self._squares[1, run.tensor] = squares
        if self._any_trust:
            self._sum_over_shards(self._squares)

    def apply(self, learning_rate: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`Update`; momentum does not depend on ``step``."""
        weight_norms, gradient_norms = self._squares.sqrt()
        for run in self._runs:
            ratio = None
            if run.tensor is not None:
                gradient_norm = gradient_norms[run.tensor] * grad_factor
                ratio = self._trust_ratio(weight_norms[run.tensor], gradient_norm, run.settings.weight_decay)
            self._update(run, learning_rate * run.settings.lr_scale, ratio, grad_factor, write)

    def _trust_ratio(self, weight_norm: Tensor, grad_norm: Tensor, weight_decay: float) -> Tensor:
        ratio = self._rule.eta * weight_norm / (grad_norm + weight_decay * weight_norm + self._rule.epsilon)
        return torch.where((weight_norm > 0) & (grad_norm > 0), ratio, torch.ones_like(ratio))

    def _update(self, run: _Run, rate: Tensor, ratio: Tensor | None, grad_factor: Tensor, write: Tensor) -> None:
        mu, settings = self._rule.momentum, run.settings
        weights, momentum = run.shard.masters[run.part], run.momenta[run.part]
        step = run.shard.gradients[run.part].to(weights.dtype) * (settings.grad_multiplier * grad_factor)
        if settings.weight_decay:
            step = step + settings.weight_decay * weights
        if ratio is not None:
            step = step * ratio
        step = -rate * step if settings.learning_rate_in_momentum else step
        new_momentum = mu * momentum + step
        direction = mu * new_momentum + step if self._rule.nesterov else new_momentum
        new_weights = weights + (direction if settings.learning_rate_in_momentum else -rate * direction)
        momentum.copy_(torch.where(write, new_momentum, momentum))
        weights.copy_(torch.where(write, new_weights, weights))
        if run.shard.has_masters:
            parameters = run.shard.parameters[run.part]
            parameters.copy_(torch.where(write, new_weights.to(parameters.dtype), parameters))


def _runs(shard: Shard, momenta: Tensor, settings: Sequence[GroupSettings]) -> list[_Run]:
    """The fragments with a trust ratio one by one, the others joined by group; padding is zero and stays zero."""
    runs: list[_Run] = []
    for fragment in shard.fragments:
        own = settings[fragment.group]
        last = runs[-1] if runs else None
        if own.trust_ratio:
            runs.append(_Run(shard, momenta, slice(fragment.start, fragment.stop), own, fragment.tensor))
        elif last is not None and last.settings is own:
            runs[-1] = replace(last, part=slice(last.part.start, fragment.stop))
        else:
            runs.append(_Run(shard, momenta, slice(fragment.start, fragment.stop), own, None))
    return runs


def _sum_of_squares(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32)).square().sum()


def _triton_momentum(
    rule: Momentum,
    shards: Sequence[Shard],
    settings: Sequence[GroupSettings],
    tensors: int,
    sum_over_shards: SumOverShards,
) -> Update:
    from common.optim.rules_triton import TritonMomentum  # triton is imported only where it is used

    return TritonMomentum(rule, shards, settings, tensors, sum_over_shards)


def triton_unsupported(request: OperationRequest) -> str | None:
    """Why the multi-tensor kernels of the update rules cannot serve ``request``; None if they can."""
    if request.dtype == torch.float64:
        return "the kernel computes in float32, the parameters are float64"
    return no_triton(request.device)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Implementation("triton", _triton_momentum, triton_unsupported),
    "torch": Implementation("torch", TorchMomentum, always),
}
"""How LARS and SGD run: multi-tensor kernels, or plain PyTorch."""


def _bind(
    rule: Momentum,
    shards: Sequence[Shard],
    settings: Sequence[GroupSettings],
    tensors: int,
    sum_over_shards: SumOverShards,
    implementation: str,
) -> Update:
    first = shards[0].parameters
    request = OperationRequest(first.device, first.dtype, channels=0)
    chosen = select(IMPLEMENTATIONS, implementation, request).function
    update: Update = chosen(rule, shards, settings, tensors, sum_over_shards)
    return update
