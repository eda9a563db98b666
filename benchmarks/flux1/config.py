"""Configuration keys of FLUX.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.model import OPERATIONS
from common.config.ranges import AtLeast, NotNegative, Positive, ProbabilityBelowOne
from common.config.sections import NetworkConfig, ThreadedReaderConfig, used_layers
from common.optim.hparams import AdamWHparams

BLOCKS = ("double_blocks", "single_blocks")
"""Numbers of blocks, in ``facts`` and ``model``."""


@dataclass(frozen=True)
class Facts(FluxArchitecture):
    """Dataset and model constants that the rules fix, besides the targets.

    Attributes:
        latent_shift, latent_scale: shift and scale of the autoencoder's latents.
        text_dropout: probability that a training sample has the encodings of the empty caption.
        eval_timesteps: number of times of the validation set; sample i is evaluated at time ``timestep_i`` / this.
        max_grad_norm: gradients are clipped to this norm.
    """

    latent_shift: float
    latent_scale: Annotated[float, Positive]
    text_dropout: Annotated[float, ProbabilityBelowOne]
    eval_timesteps: Annotated[int, AtLeast(1)]
    max_grad_norm: Annotated[float, Positive]


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The tunable hyperparameters: the rows for ``flux1`` in the table of the rules.

    Attributes:
        warmup_steps: length W of the linear warm-up; update s, counted from 0, has (s + 1) / W of the full rate.
            Afterwards the rate is constant.
    """

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """The part of the network that is used, its memory, and the implementations of its operations.

    Attributes:
        double_blocks, single_blocks: number of blocks, for measurements on few GPUs; 0 for all.
        recomputed_blocks: number of blocks, from the first, that recompute all activations in the backward pass.
        recomputed_operations: number of the following blocks that recompute all activations but the results of matrix
            products, which takes less time. It must be 0 or ``auto`` with ``layout.tp`` above 1 or with
            ``implementations.linear=te``. If both are ``auto``, the memory of the GPU determines them; if one is, it
            counts as 0.
        zero_std: standard deviation of the normal values that replace the zero initialisation of modulations and
            output. Speed measurements set it, because zeros are faster than trained weights. 0 in training.
    """

    operations = OPERATIONS
    double_blocks: Annotated[int, NotNegative]
    single_blocks: Annotated[int, NotNegative]
    recomputed_blocks: Annotated[int, NotNegative] | Literal["auto"]
    recomputed_operations: Annotated[int, NotNegative] | Literal["auto"]
    zero_std: Annotated[float, NotNegative] = 0.0


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(ThreadedReaderConfig):
    """Options of reading samples.

    Attributes:
        eval_batch: samples that one rank evaluates together.
    """

    eval_batch: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class FluxConfig:
    """FLUX.1's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig

    def __post_init__(self) -> None:
        used_layers(self.facts, self.model, "network", *BLOCKS)

    @property
    def architecture(self) -> FluxArchitecture:
        """Return the sizes of the part of the network that ``model.double_blocks`` and ``single_blocks`` select."""
        used: FluxArchitecture = used_layers(self.facts, self.model, "network", *BLOCKS)
        return used
