"""Tunable hyperparameters of the optimizers, as the rules' tables have them.

A workload's ``Hparams`` extends one of these, so that the keys ``hparams.*`` of all workloads mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import Decay, FiniteNotNegative, Positive, Range
from common.optim.adagrad import Adagrad
from common.optim.adaptive import LAMB, SMALLEST_EPSILON, Adam, AdamW
from common.optim.momentum import LARS, SGD

AdaptiveEpsilon = Range(
    f"finite and at least {SMALLEST_EPSILON:.2g}", lambda value: SMALLEST_EPSILON <= value < math.inf
)


@dataclass(frozen=True)
class SgdHparams:
    """Those of stochastic gradient descent with momentum.

    Attributes:
        source: where the set was published.
        global_batch_size: samples of one optimizer step.
        base_learning_rate: the highest.
    """

    source: str
    global_batch_size: int
    base_learning_rate: Annotated[float, Positive]
    momentum: Annotated[float, Decay]
    weight_decay: Annotated[float, FiniteNotNegative]

    def sgd(self, nesterov: bool = False) -> SGD:
        """The update rule. Without momentum, Nesterov's step equals the ordinary one."""
        return SGD(self.momentum, nesterov=nesterov and self.momentum > 0)


@dataclass(frozen=True)
class LarsHparams(SgdHparams):
    """Those of LARS.

    Attributes:
        lars_eta: the trust coefficient.
        lars_epsilon: added to the denominator of the trust ratio.
    """

    lars_eta: Annotated[float, FiniteNotNegative]
    lars_epsilon: Annotated[float, FiniteNotNegative]

    def lars(self) -> LARS:
        """The update rule."""
        return LARS(self.momentum, self.lars_eta, self.lars_epsilon)


@dataclass(frozen=True)
class MomentsHparams:
    """Those of Adam's family.

    Attributes:
        source: where the set was published.
        global_batch_size: samples of one optimizer step.
        base_learning_rate: the highest.
        beta_1, beta_2: how much of themselves the moments keep.
        epsilon: added to the root of the second moment.
    """

    source: str
    global_batch_size: int
    base_learning_rate: Annotated[float, Positive]
    beta_1: Annotated[float, Decay]
    beta_2: Annotated[float, Decay]
    epsilon: Annotated[float, AdaptiveEpsilon]
    weight_decay: Annotated[float, FiniteNotNegative]


@dataclass(frozen=True)
class LambHparams(MomentsHparams):
    """Those of LAMB."""

    def lamb(self) -> LAMB:
        """The update rule."""
        return LAMB(self.beta_1, self.beta_2, self.epsilon)


@dataclass(frozen=True)
class AdamHparams(MomentsHparams):
    """Those of Adam."""

    def adam(self) -> Adam:
        """The update rule."""
        return Adam(self.beta_1, self.beta_2, self.epsilon)


@dataclass(frozen=True)
class AdamWHparams(MomentsHparams):
    """Those of AdamW."""

    def adamw(self) -> AdamW:
        """The update rule."""
        return AdamW(self.beta_1, self.beta_2, self.epsilon)


@dataclass(frozen=True)
class AdagradHparams:
    """Those of Adagrad.

    Attributes:
        source: where the set was published.
        global_batch_size: samples of one optimizer step.
        base_learning_rate: of every step.
        epsilon: added to the root of the sum of squares.
    """

    source: str
    global_batch_size: int
    base_learning_rate: Annotated[float, Positive]
    epsilon: Annotated[float, AdaptiveEpsilon]

    def adagrad(self) -> Adagrad:
        """The update rule."""
        return Adagrad(self.epsilon)
