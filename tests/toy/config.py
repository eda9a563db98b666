"""Configuration: facts of the data, and sections of the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import AtLeast, NotNegative, Share
from common.optim.hparams import SgdHparams


@dataclass(frozen=True)
class Facts:
    """Edge of a volume in voxels, and number of parameters to estimate."""

    size: Annotated[int, AtLeast(1)]
    parameters: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """The hyperparameters in the rules: a linear warm-up from a fraction of the rate, and a decay at each boundary."""

    optimizer: Literal["sgd"]
    warmup_epochs: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, Share]
    decay_boundary_epochs: tuple[int, ...]
    decay_factor: Annotated[float, Share]


@dataclass(frozen=True)
class ModelConfig:
    """Width of the hidden layer."""

    width: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class ReaderConfig:
    """Volumes of one evaluation batch on one rank."""

    eval_batch: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class ToyConfig:
    """The workload's part of the configuration."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
