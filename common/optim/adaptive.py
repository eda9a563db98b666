"""LAMB, AdamW, Adam and Adagrad on shards.

With g the gradient times the group's multiplier and the factor, w the fp32 weight, lambda the weight decay, lr the
learning rate times the group's scale and t = 1, 2, ... the number of the update:

    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    u  = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + lambda * w
    r  = |w| / |u|    for each tensor; 1 where |w| or |u| is 0, and without trust ratio
    w <- w - lr * r * u

LAMB: You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2, with the identity as phi. A group
without weight decay still has a trust ratio unless that is switched off too; MLPerf BERT switches off both for biases
and norms. AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), without r. Adam: Kingma and
Ba (2015), without r, and with the decay in the gradient (g + lambda * w) instead of in u.

Adagrad keeps a sum of squares s for each element (not for each row), which starts at 0:

    d = g + lambda * w;  s <- s + d^2;  w <- w - lr * d / (sqrt(s) + epsilon)

Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization" (2011),
figure 1 with diagonal matrices. The learning rate does not decay. Epsilon is outside the root, as in
``torch.optim.Adagrad``. An element whose gradients were all 0 keeps its value: 0 / (0 + epsilon) = 0.
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

SMALLEST_EPSILON = torch.finfo(torch.float32).tiny
"""Smallest epsilon. A smaller one is 0 in fp32, and a weight that never had a gradient would become 0 / 0."""


@dataclass(frozen=True)
class _MomentsRule(Rule):
    """Hyperparameters that LAMB, AdamW and Adam share.

    Args:
        beta1, beta2: decay of the moments, in [0, 1).
        epsilon: added outside the square root.

    Raises:
        ValueError: a beta or epsilon is out of its range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name}={beta}: it must be at least 0 and below 1")
        _check_epsilon(self.epsilon)


@dataclass(frozen=True)
class LAMB(_MomentsRule):
    """Hyperparameters of LAMB: Adam with decoupled weight decay and one trust ratio for each tensor.

    Args:
        bias_correction: divide the moments by 1 - beta^t.
        norm_of: take |w| of the fp32 masters or of the model's weights.
    """

    epsilon: float = 1e-6
    bias_correction: bool = True
    norm_of: Literal["master", "model"] = "master"

    def formula(self) -> Moments:
        return Moments(
            self.beta1, self.beta2, self.epsilon, self.bias_correction, norm_of_model=self.norm_of == "model"
        )


@dataclass(frozen=True)
class AdamW(_MomentsRule):
    """Hyperparameters of AdamW: Adam with decoupled weight decay."""

    instead: ClassVar[str] = "LAMB"

    def formula(self) -> Moments:
        return Moments(self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True)
class Adam(_MomentsRule):
    """Hyperparameters of Adam. The weight decay is added to the gradient."""

    instead: ClassVar[str] = "LAMB"

    def formula(self) -> Moments:
        return Moments(self.beta1, self.beta2, self.epsilon, decay_in_gradient=True)


@dataclass(frozen=True)
class Moments(Formula):
    """Common formula of LAMB, AdamW and Adam. The module docstring has it."""

    takes_remainders: ClassVar[bool] = True

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool = True
    decay_in_gradient: bool = False
    norm_of_model: bool = False

    def operation(self) -> Operation:
        return ADAPTIVE


@dataclass(frozen=True)
class Adagrad(Rule, Formula):
    """Hyperparameters of Adagrad. The weight decay is added to the gradient.

    Args:
        epsilon: added to the root of the sum of squares.

    Raises:
        ValueError: epsilon is 0 in fp32. An element without a gradient would become 0 / 0.
    """

    instead: ClassVar[str] = "LAMB"

    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def formula(self) -> Adagrad:
        return self

    def operation(self) -> Operation:
        return ADAGRAD


class ReferenceAdaptive(Update):
    """LAMB, AdamW and Adam in plain PyTorch: flat operations for each run, norms and trust ratios for each tensor."""

    implementation = "reference"
    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(self, formula: Moments, binding: Binding) -> None:
        super().__init__(binding)
        self._formula = formula
        self._runs = runs_of(binding, list(self.states.values()), alone=False)

    def measure(self, stats: Tensor) -> None:
        note_overflow(self._shards, stats)
        for run in self._runs:
            norm = torch.linalg.vector_norm(run.shard.gradients[run.part], dtype=run.shard.master_dtype)
            stats[1] += (norm * run.settings.grad_multiplier).square() * run.settings.norm_share

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        corrections = self._corrections(step)
        self._squares.zero_()
        directions = []
        for run in self._runs:
            direction = self._direction(run, corrections, grad_factor, write)
            if run.settings.trust_ratio:
                self._add_squares(run, direction)
            directions.append(direction)
        self._complete_squares()
        ratios = self._ratios()
        for run, direction in zip(self._runs, directions, strict=True):
            if run.settings.trust_ratio:
                torch._foreach_mul_(run.views(direction), [ratios[f.tensor] for f in run.fragments])
            run.write(write, run.masters - rates_G[run.group] * direction)

    def _corrections(self, step: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return the factors for m and sqrt(v) that correct the bias."""
        formula = self._formula
        if not formula.bias_correction:
            return 1.0, 1.0
        count = (step + 1).double()  # fp64, because 1 - beta^t cancels most digits
        return 1.0 / (1.0 - formula.beta1**count), (1.0 - formula.beta2**count).rsqrt()

    def _direction(
        self, run: Run, corrections: tuple[Tensor | float, Tensor | float], grad_factor: Tensor, write: Tensor
    ) -> Tensor:
        """Update the moments of one run and return its direction u."""
        formula, decay, weights = self._formula, run.settings.weight_decay, run.masters
        average, square_average = run.states
        gradient = run.gradients(grad_factor)
        if formula.decay_in_gradient and decay:
            gradient = gradient + decay * weights
        moved = formula.beta1 * average + (1.0 - formula.beta1) * gradient
        moved_square = formula.beta2 * square_average + (1.0 - formula.beta2) * gradient.square()
        direction = (moved * corrections[0]) / (moved_square.sqrt() * corrections[1] + formula.epsilon)
        if decay and not formula.decay_in_gradient:
            direction = direction + decay * weights
        write_where(write, average, moved)
        write_where(write, square_average, moved_square)
        return direction

    def _add_squares(self, run: Run, direction: Tensor) -> None:
        weights = run.weights_for_norms(self._formula.norm_of_model)
        for squares, flat in zip(self._squares, (weights, direction), strict=True):
            norms = torch._foreach_norm(run.views(flat), dtype=run.shard.master_dtype)
            for fragment, norm in zip(run.fragments, norms, strict=True):
                squares[fragment.tensor] = norm.square()

    def _ratios(self) -> Tensor:
        weight_norms, direction_norms = self._squares.sqrt()
        defined = (weight_norms > 0) & (direction_norms > 0)
        return torch.where(defined, weight_norms / direction_norms, torch.ones_like(weight_norms))


def _check_epsilon(epsilon: float) -> None:
    if not epsilon >= SMALLEST_EPSILON:
        raise ValueError(f"epsilon={epsilon}: it must be at least {SMALLEST_EPSILON:.2g}")


ADAPTIVE = Operation(
    "adaptive",
    ReferenceAdaptive,
    {"triton": Implementation("common.optim.rules_triton:TritonAdaptive", triton_unsupported)},
    cases="common.optim.update_cases:LAMB_AND_ADAM",
)
"""Implementations of LAMB, AdamW and Adam: plain PyTorch (the reference) and multi-tensor Triton kernels."""


class ReferenceAdagrad(Update):
    """Adagrad in plain PyTorch: one chain of operations for each run of neighbouring fragments of a group."""

    implementation = "reference"
    kinds = ("sum",)

    def __init__(self, formula: Adagrad, binding: Binding) -> None:
        super().__init__(binding)
        self._epsilon = formula.epsilon
        self._runs = runs_of(binding, list(self.states.values()), alone=False)

    def measure(self, stats: Tensor) -> None:
        note_overflow(self._shards, stats)
        for run in self._runs:
            gradients = run.shard.gradients[run.part]
            squared = gradients.to(torch.promote_types(gradients.dtype, torch.float32)).square()
            stats[1] += squared.sum() * (run.settings.grad_multiplier**2 * run.settings.norm_share)

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """Adagrad does not use ``step``."""
        for run in self._runs:
            (total,) = run.states
            gradients = run.gradients(grad_factor)
            if run.settings.weight_decay:
                gradients = gradients + run.settings.weight_decay * run.masters
            grown = total + gradients.square()
            weights = run.masters - rates_G[run.group] * (gradients / (grown.sqrt() + self._epsilon))
            write_where(write, total, grown)
            run.write(write, weights)


ADAGRAD = Operation(
    "adagrad",
    ReferenceAdagrad,
    {"triton": Implementation("common.optim.rules_triton:TritonAdagrad", triton_unsupported)},
    cases="common.optim.update_cases:ADAGRAD",
)
"""Implementations of Adagrad: plain PyTorch (the reference) and multi-tensor Triton kernels."""
