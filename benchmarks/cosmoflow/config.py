"""Configuration keys of CosmoFlow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.cosmoflow.data import CubeReaderConfig
from benchmarks.cosmoflow.model import OPERATIONS, CosmoFlowArchitecture
from common.config.ranges import Ascending, AtLeast, Each, NotNegative, Positive, ProbabilityBelowOne
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.optim.hparams import SgdHparams


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """The tunable hyperparameters: the rows for ``cosmoflow`` in the table of the HPC rules.

    Attributes:
        variant: ``nvidia``: a boundary holds from its epoch on, and ``weight_decay`` times the weight is added to the
            gradient. ``reference``: a boundary holds from the next epoch on, and ``weight_decay`` is Keras's factor of
            the squared weights in the loss, whose gradient is twice as large.
        weight_decay: factor of the penalty on the weights. Only the kernels of the hidden dense layers have one.
        warmup_epochs: epochs in which the learning rate rises.
        warmup_factor: ``base_learning_rate`` divided by the learning rate of the first epoch.
        decay_boundary_epochs: epochs, counted from 0, at which the learning rate changes after the warm-up.
        decay_factors: factor of ``base_learning_rate`` behind each boundary.
        dropout: probability of dropping an output of a hidden dense layer.
    """

    optimizer: Literal["sgd"]
    variant: Literal["nvidia", "reference"]
    warmup_epochs: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, AtLeast(1)]
    decay_boundary_epochs: Annotated[tuple[int, ...], Ascending("epochs")]
    decay_factors: Annotated[tuple[float, ...], Each(Positive)]
    dropout: Annotated[float, ProbabilityBelowOne]

    def __post_init__(self) -> None:
        if len(self.decay_factors) != len(self.decay_boundary_epochs):
            raise ConfigError(
                f"decay_factors={list(self.decay_factors)}: one for each of "
                f"decay_boundary_epochs={list(self.decay_boundary_epochs)}"
            )

    @property
    def first_decayed_epochs(self) -> list[int]:
        """First epoch of each decay factor."""
        return [epoch + (self.variant == "reference") for epoch in self.decay_boundary_epochs]

    @property
    def gradient_decay(self) -> float:
        """Factor of a weight that is added to its gradient."""
        return self.weight_decay * (2 if self.variant == "reference" else 1)


@dataclass(frozen=True)
class ModelConfig(NetworkConfig):
    """Options of the network."""

    operations = OPERATIONS


@dataclass(frozen=True)
class CosmoFlowConfig:
    """CosmoFlow's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: CosmoFlowArchitecture
    hparams: Hparams
    model: ModelConfig
    reader: CubeReaderConfig
