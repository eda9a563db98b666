"""Configuration keys of FLUX.1."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.model import OPERATIONS
from common.config.ranges import AtLeast, NotNegative, Positive, ProbabilityBelowOne
from common.errors import ConfigError
from common.ops.operation import all_implementations
from common.optim.hparams import AdamWHparams


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
class ModelConfig:
    """The part of the network that is used, its memory, and the implementations of its operations.

    Attributes:
        double_blocks, single_blocks: number of blocks, for measurements on few GPUs; 0 for all.
        recomputed_blocks: number of blocks, from the first, that recompute all activations in the backward pass.
        recomputed_operations: number of the following blocks that recompute all activations but the results of matrix
            products, which takes less time. It must be 0 or ``auto`` with ``layout.tp`` above 1 or with
            ``implementations.linear=te``. If both are ``auto``, the memory of the GPU determines them; if one is, it
            counts as 0.
        loss_scale: initial loss scale with fp16.
        zero_std: standard deviation of the normal values that replace the zero initialisation of modulations and
            output. Speed measurements set it, because zeros are faster than trained weights. 0 in training.
        implementations: implementation by operation name; ``auto`` for operations that are not listed.
    """

    double_blocks: Annotated[int, NotNegative]
    single_blocks: Annotated[int, NotNegative]
    recomputed_blocks: Annotated[int, NotNegative] | Literal["auto"]
    recomputed_operations: Annotated[int, NotNegative] | Literal["auto"]
    loss_scale: Annotated[float, Positive]
    zero_std: Annotated[float, NotNegative] = 0.0
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class ReaderConfig:
    """Options of reading samples.

    Attributes:
        threads: threads that read.
        prefetch: batches that are read ahead.
        eval_batch: samples that one rank evaluates together.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1)]
    eval_batch: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class FluxConfig:
    """FLUX.1's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig

    def __post_init__(self) -> None:
        for name in ("double_blocks", "single_blocks"):
            asked, whole = getattr(self.model, name), getattr(self.facts, name)
            if asked > whole:
                raise ConfigError(f"model.{name}={asked}: the network has {whole}; 0 uses all")
