"""Hyperparameters of the two families of update formulas, shared by the PyTorch and Triton implementations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MomentumValues:
    """Hyperparameters of LARS and SGD; see the formulas in :mod:`common.optim.momentum`."""

    momentum: float
    nesterov: bool
    eta: float
    epsilon: float
    norm_of_model: bool


@dataclass(frozen=True)
class MomentsValues:
    """Hyperparameters of LAMB, AdamW and Adam; see the formulas in :mod:`common.optim.adaptive`."""

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool = True
    decay_in_gradient: bool = False
    norm_of_model: bool = False
