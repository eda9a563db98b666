"""Configuration keys of DeepCAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.deepcam.data import ClimateReaderConfig
from benchmarks.deepcam.model import OPERATIONS, DeepLabArchitecture
from benchmarks.deepcam.samples import CLASSES
from benchmarks.deepcam.schedule import WarmUp
from common.config.ranges import AtLeast, Each, NotNegative, Positive, Probability, Range
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.optim.hparams import LambHparams

Frequencies = Range(f"{CLASSES} positive numbers", lambda value: len(value) == CLASSES and Each(Positive).holds(value))


@dataclass(frozen=True)
class Facts(DeepLabArchitecture):
    """Constants of the rules: the network, the weights of the loss, and the clipping of the gradient.

    Attributes:
        class_frequencies: share of the pixels in each class.
        class_weight_exponent: the loss of a pixel is weighted by the frequency of its class to this power.
        max_grad_norm: norm to which the gradient over all parameters is clipped.
    """

    class_frequencies: Annotated[tuple[float, ...], Frequencies]
    class_weight_exponent: float
    max_grad_norm: Annotated[float, Positive]

    @property
    def class_weights(self) -> list[float]:
        """Weight of each class in the loss."""
        return [frequency**self.class_weight_exponent for frequency in self.class_frequencies]


@dataclass(frozen=True)
class Hparams(LambHparams):
    """The tunable hyperparameters: the rows for ``deepcam`` in the table of the HPC rules.

    Attributes:
        bn_group: number of ranks that share batch-norm statistics.
        scheduler: how the learning rate falls after the warm-up (:mod:`benchmarks.deepcam.schedule`).
        warmup_steps: optimizer steps in which the learning rate rises.
        warmup_factor: factor on ``base_learning_rate`` at the end of the warm-up. With 1 the warm-up starts at 0,
            otherwise at ``base_learning_rate``.
        milestones, decay_rate: ``multistep`` multiplies the learning rate by ``decay_rate`` at every milestone, counted
            in steps after the warm-up.
        t_max, eta_min: ``cosine_annealing`` falls to ``eta_min`` in ``t_max`` steps after the warm-up.
    """

    optimizer: Literal["lamb"]
    bn_group: Annotated[int, AtLeast(1)]
    scheduler: Literal["multistep", "cosine_annealing"]
    warmup_steps: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, AtLeast(1)]
    milestones: Annotated[tuple[int, ...], Each(AtLeast(1))]
    decay_rate: Annotated[float, Probability]
    t_max: Annotated[int, NotNegative]
    eta_min: Annotated[float, NotNegative]

    def __post_init__(self) -> None:
        if self.scheduler == "cosine_annealing" and self.t_max < 1:
            raise ConfigError(f"t_max={self.t_max}: at least 1 with scheduler=cosine_annealing")

    @property
    def betas(self) -> list[float]:
        """Decay of the first and second moment, in the form of the log."""
        return [self.beta_1, self.beta_2]

    def warm_up(self) -> WarmUp:
        """Return the warm-up of the learning rate."""
        return WarmUp(self.base_learning_rate, self.warmup_steps, self.warmup_factor)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Options of the network.

    Attributes:
        low_level_relu: see :class:`benchmarks.deepcam.model.DeepLab`.
    """

    operations = OPERATIONS
    low_level_relu: bool


@dataclass(frozen=True)
class DeepCamConfig:
    """DeepCAM's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ClimateReaderConfig
