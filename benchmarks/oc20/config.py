"""Configuration keys of OpenCatalyst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.oc20.data import OcReaderConfig
from benchmarks.oc20.model import OPERATIONS, DimeNetArchitecture
from common.config.ranges import Ascending, NotNegative, Positive, Share
from common.config.sections import NetworkConfig
from common.optim.hparams import AdamWHparams


@dataclass(frozen=True)
class Facts(DimeNetArchitecture):
    """Constants of the rules: the network and its loss.

    Attributes:
        force_std: the network's unit of forces, in eV/angstrom: the standard deviation of the training set's energies.
        force_weight: factor on the mean over the free atoms of the L1 norm of a force's error, in the network's unit.
    """

    force_std: Annotated[float, Positive]
    force_weight: Annotated[float, Positive]


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The tunable hyperparameters: the rows for ``oc20`` in the table of the HPC rules.

    Attributes:
        warmup_steps: optimizer steps in which the learning rate rises.
        warmup_factor: factor on ``base_learning_rate`` at the start of the warm-up.
        decay_boundary_steps: optimizer steps from which on the learning rate is lower.
        decay_factor: factor on the learning rate at every boundary.
    """

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, Share]
    decay_boundary_steps: Annotated[tuple[int, ...], Ascending("steps")]
    decay_factor: Annotated[float, Share]


@dataclass(frozen=True)
class ModelConfig(NetworkConfig):
    """Options of the network."""

    operations = OPERATIONS


@dataclass(frozen=True)
class Oc20Config:
    """OpenCatalyst's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: OcReaderConfig
