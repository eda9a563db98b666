"""The numbers of the two families of update formulas, which plain PyTorch and Triton read alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MomentumValues:
    """What LARS and SGD come down to; see the formulas at the top of :mod:`common.optim.momentum`."""

    momentum: float
    nesterov: bool
    eta: float
    epsilon: float
    norm_of_model: bool


@dataclass(frozen=True)
class MomentsValues:
    """What LAMB, AdamW and Adam come down to; see the formulas at the top of :mod:`common.optim.adaptive`."""

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool = True
    decay_in_gradient: bool = False
    norm_of_model: bool = False
