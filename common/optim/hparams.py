"""Tunable hyperparameters of the optimizers, named as in the tables of the training rules.

The ``Hparams`` of a workload extends one of these classes, so the keys ``hparams.*`` mean the same in all workloads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import Decay, NotNegative, Positive, Range
from common.optim.adaptive import LAMB, SMALLEST_EPSILON, Adagrad, Adam, AdamW
from common.optim.momentum import LARS, SGD

AdaptiveEpsilon = Range(
    f"finite and at least {SMALLEST_EPSILON:.2g}", lambda value: SMALLEST_EPSILON <= value < math.inf
)


@dataclass(frozen=True)
class SgdHparams:
    """Hyperparameters of stochastic gradient descent with momentum.

    Attributes:
        source: publication of the set.
        global_batch_size: samples per optimizer step.
        base_learning_rate: highest learning rate.
    """

    source: str
    global_batch_size: int
    base_learning_rate: Annotated[float, Positive]
    momentum: Annotated[float, Decay]
    weight_decay: Annotated[float, NotNegative]

    def sgd(self, nesterov: bool = False) -> SGD:
        """Return the update rule. Nesterov is ignored without momentum, where it makes no difference."""
        return SGD(self.momentum, nesterov=nesterov and self.momentum > 0)


@dataclass(frozen=True)
class LarsHparams(SgdHparams):
    """Hyperparameters of LARS.

    Attributes:
        lars_eta: the trust coefficient.
        lars_epsilon: added to the denominator of the trust ratio.
    """

    lars_eta: Annotated[float, NotNegative]
    lars_epsilon: Annotated[float, NotNegative]

    def lars(self) -> LARS:
        """Return the update rule."""
        return LARS(self.momentum, self.lars_eta, self.lars_epsilon)


@dataclass(frozen=True)
class MomentsHparams:
    """Hyperparameters that LAMB, Adam and AdamW share.

    Attributes:
        source: publication of the set.
        base_learning_rate: highest learning rate.
        beta_1, beta_2: decay of the first and second moment.
        epsilon: added to the root of the second moment.
    """

    source: str
    global_batch_size: int
    base_learning_rate: Annotated[float, Positive]
    beta_1: Annotated[float, Decay]
    beta_2: Annotated[float, Decay]
    epsilon: Annotated[float, AdaptiveEpsilon]
    weight_decay: Annotated[float, NotNegative]


@dataclass(frozen=True)
class LambHparams(MomentsHparams):
    """Hyperparameters of LAMB."""

    def lamb(self) -> LAMB:
        """Return the update rule."""
        return LAMB(self.beta_1, self.beta_2, self.epsilon)


@dataclass(frozen=True)
class AdamHparams(MomentsHparams):
    """Hyperparameters of Adam."""

    def adam(self) -> Adam:
        """Return the update rule."""
        return Adam(self.beta_1, self.beta_2, self.epsilon)


@dataclass(frozen=True)
class AdamWHparams(MomentsHparams):
    """Hyperparameters of AdamW."""

    def adamw(self) -> AdamW:
        """Return the update rule."""
        return AdamW(self.beta_1, self.beta_2, self.epsilon)


@dataclass(frozen=True)
class AdagradHparams:
    """Hyperparameters of Adagrad.

    Attributes:
        source: publication of the set.
        base_learning_rate: learning rate of every step.
        epsilon: added to the root of the sum of squares.
    """

    source: str
    global_batch_size: int
    base_learning_rate: Annotated[float, Positive]
    epsilon: Annotated[float, AdaptiveEpsilon]

    def adagrad(self) -> Adagrad:
        """Return the update rule."""
        return Adagrad(self.epsilon)
