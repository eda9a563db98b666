"""LARS and SGD on shards.

With g the gradient times the group's multiplier and the factor, w the fp32 weight, lambda the weight decay, mu the
momentum and lr the learning rate times the group's scale:

    tau = eta * |w| / (|g| + lambda * |w| + epsilon)    trust ratio; 1 where |w| or |g| is 0, and without trust ratio
    d   = tau * (g + lambda * w)
    learning rate in the momentum:   m <- mu * m - lr * d;  w <- w + m;       Nesterov:  w <- w + mu * m - lr * d
    outside:                         m <- mu * m + d;       w <- w - lr * m;  Nesterov:  w <- w - lr * (mu * m + d)

Both forms agree while the learning rate is constant. LARS: You, Gitman, Ginsburg, "Large Batch Training of
Convolutional Networks" (2017), algorithm 1. The MLPerf ResNet reference uses the first form; the second form with
LARS equals the momentum correction of NVIDIA's submissions. Nesterov: Bengio, Boulanger-Lewandowski, Pascanu,
"Advances in Optimizing Recurrent Networks" (2013), where w is the point at which the gradient was taken. The second
Nesterov form is ``torch.optim.SGD(nesterov=True)``, which the MLPerf 3D U-Net reference uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.ops.operation import Implementation, Operation
from common.optim.rules import (
    Binding,
    Formula,
    Rule,
    Run,
    Update,
    note_overflow,
    runs_of,
    triton_unsupported,
    write_where,
)


@dataclass(frozen=True)
class LARS(Rule):
    """Hyperparameters of LARS: layer-wise adaptive rate scaling with momentum.

    Args:
        momentum: mu.
        epsilon: added to the denominator of the trust ratio.
        norm_of: take |w| of the fp32 masters or of the model's weights.
    """

    momentum: float
    eta: float = 0.001
    epsilon: float = 0.0
    norm_of: Literal["master", "model"] = "master"

    def formula(self) -> Momentum:
        return Momentum(self.momentum, False, self.eta, self.epsilon, self.norm_of == "model")


@dataclass(frozen=True)
class SGD(Rule):
    """Hyperparameters of stochastic gradient descent with momentum. The weight decay is added to the gradient.

    Args:
        momentum: mu.
        nesterov: use Nesterov's step; see the formulas in the module docstring.

    Raises:
        ValueError: Nesterov without momentum.
    """

    instead: ClassVar[str] = "LARS"

    momentum: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"momentum={self.momentum}: Nesterov's step takes a positive momentum")

    def formula(self) -> Momentum:
        return Momentum(self.momentum, self.nesterov, 0.0, 0.0, False)


@dataclass(frozen=True)
class Momentum(Formula):
    """Common formula of LARS and SGD. The module docstring has it."""

    momentum: float
    nesterov: bool
    eta: float
    epsilon: float
    norm_of_model: bool

    def operation(self) -> Operation:
        return MOMENTUM


class ReferenceMomentum(Update):
    """LARS and SGD in plain PyTorch: one chain of operations per run; a tensor with a trust ratio is one run."""

    implementation = "reference"
    kinds = ("momentum",)

    def __init__(self, formula: Momentum, binding: Binding) -> None:
        super().__init__(binding)
        self._formula = formula
        self._runs = runs_of(binding, list(self.states.values()), alone=True)

    def measure(self, stats: Tensor) -> None:
        note_overflow(self._shards, stats)
        self._squares.zero_()
        for run in self._runs:
            squares = _sum_of_squares(run.shard.gradients[run.part]) * run.settings.grad_multiplier**2
            stats[1] += squares * run.settings.norm_share
            if run.settings.trust_ratio:
                (fragment,) = run.fragments
                weights = run.weights_for_norms(self._formula.norm_of_model)
                self._squares[0, fragment.tensor] = _sum_of_squares(weights)
                self._squares[1, fragment.tensor] = squares
        self._complete_squares()

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """LARS and SGD do not use ``step``."""
        weight_norms, gradient_norms = self._squares.sqrt()
        for run in self._runs:
            ratio = None
            if run.settings.trust_ratio:
                (fragment,) = run.fragments
                gradient_norm = gradient_norms[fragment.tensor] * grad_factor
                ratio = self._trust_ratio(weight_norms[fragment.tensor], gradient_norm, run.settings.weight_decay)
            self._update(run, rates_G[run.group], ratio, grad_factor, write)

    def _trust_ratio(self, weight_norm: Tensor, grad_norm: Tensor, weight_decay: float) -> Tensor:
        ratio = self._formula.eta * weight_norm / (grad_norm + weight_decay * weight_norm + self._formula.epsilon)
        return torch.where((weight_norm > 0) & (grad_norm > 0), ratio, torch.ones_like(ratio))

    def _update(self, run: Run, rate: Tensor, ratio: Tensor | None, grad_factor: Tensor, write: Tensor) -> None:
        mu, settings, weights = self._formula.momentum, run.settings, run.masters
        (momentum,) = run.states
        step = run.gradients(grad_factor)
        if settings.weight_decay:
            step = step + settings.weight_decay * weights
        if ratio is not None:
            step = step * ratio
        step = -rate * step if settings.learning_rate_in_momentum else step
        new_momentum = mu * momentum + step
        direction = mu * new_momentum + step if self._formula.nesterov else new_momentum
        write_where(write, momentum, new_momentum)
        run.write(write, weights + (direction if settings.learning_rate_in_momentum else -rate * direction))


def _sum_of_squares(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32)).square().sum()


MOMENTUM = Operation(
    "momentum",
    ReferenceMomentum,
    {"triton": Implementation("common.optim.rules_triton:TritonMomentum", triton_unsupported)},
    cases="common.optim.update_cases:LARS_AND_SGD",
)
"""Implementations of LARS and SGD: plain PyTorch (the reference) and multi-tensor Triton kernels."""
