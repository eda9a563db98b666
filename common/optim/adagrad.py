"""Adagrad on shards. The sum of squares is kept for each element (not for each row).

With g the gradient times the group's multiplier and the factor, w the fp32 weight, lambda the weight decay and lr the
learning rate times the group's scale:

    d = g + lambda * w;  s <- s + d^2;  w <- w - lr * d / (sqrt(s) + epsilon)

s starts at 0, and the learning rate does not decay. Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for
Online Learning and Stochastic Optimization" (2011), figure 1 with diagonal matrices. Epsilon is outside the root, as
in ``torch.optim.Adagrad``. An element whose gradients were all 0 keeps its value: 0 / (0 + epsilon) = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.ops.operation import Implementation, Operation
from common.optim.adaptive import SMALLEST_EPSILON
from common.optim.fragment_runs import note_overflow, runs_of, write_where
from common.optim.rules import Binding, Formula, Rule, Update, triton_unsupported


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
        if not self.epsilon >= SMALLEST_EPSILON:
            raise ValueError(f"epsilon={self.epsilon}: it must be at least {SMALLEST_EPSILON:.2g}")

    def formula(self) -> Adagrad:
        """See :class:`common.optim.rules.Rule`."""
        return self

    def operation(self) -> Operation:
        """See :class:`common.optim.rules.Formula`."""
        return ADAGRAD


class ReferenceAdagrad(Update):
    """Adagrad in plain PyTorch: one chain of operations for each run of neighbouring fragments of a group."""

    implementation = "reference"
    kinds = ("sum",)

    def __init__(self, formula: Adagrad, binding: Binding) -> None:
        super().__init__(binding)
        self._epsilon = formula.epsilon
        self._runs = runs_of(binding, list(self.states.values()), alone=False)

    def measure(self, stats: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        note_overflow(self._shards, stats)
        for run in self._runs:
            gradients = run.shard.gradients[run.part]
            wide = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
            stats[1] += wide.square().sum() * (run.settings.grad_multiplier**2 * run.settings.norm_share)

    def apply(self, rates_G: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`. Adagrad does not use ``step``."""
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
    {"triton": Implementation("common.optim.adagrad_triton:TritonAdagrad", triton_unsupported)},
    cases="common.optim.update_cases:ADAGRAD",
)
"""Implementations of Adagrad: plain PyTorch (the reference) and multi-tensor Triton kernels."""
