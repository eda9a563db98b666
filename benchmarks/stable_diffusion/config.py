"""Stable Diffusion's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.stable_diffusion.architecture import Architecture
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.operations import OPERATIONS
from common.config.ranges import AtLeast, FiniteNotNegative, NotNegative, Positive, ShareAboveZero, ShareBelowOne
from common.errors import ConfigError
from common.ops.operation import all_implementations
from common.optim.hparams import AdamWHparams


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the targets: the network, which takes them as they are, the diffusion and the sampler.

    Attributes:
        image_size: height and width of pictures, px.
        times: steps of the diffusion.
        first_beta, last_beta: variance of the noise of its first and last step.
        sampling_steps: of a generated picture.
        guidance: weight of the caption against no caption.
    """

    image_size: Annotated[int, AtLeast(1)]
    times: Annotated[int, AtLeast(2)]
    first_beta: Annotated[float, ShareAboveZero]
    last_beta: Annotated[float, ShareBelowOne]
    sampling_steps: Annotated[int, AtLeast(1)]
    guidance: Annotated[float, NotNegative]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_beta > self.last_beta:
            raise ConfigError(f"first_beta={self.first_beta}: at most last_beta={self.last_beta}")
        if self.times % self.sampling_steps or self.times == self.sampling_steps:
            raise ConfigError(f"sampling_steps={self.sampling_steps}: a divisor of times={self.times}, and less")


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``stable_diffusion``.

    Attributes:
        base_learning_rate: of one sample; the step's, which is logged, is ``global_batch_size`` times as high.
        warmup_steps: W, in which the rate rises linearly; then it stays.
        variant: of the warm-up: with n updates done, ``reference`` has 1e-6 + (1 - 1e-6) n / W of the rate, ``nvidia``
            (n + 1) / (W + 1).
    """

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]
    variant: Literal["nvidia", "reference"]

    @property
    def learning_rate(self) -> float:
        """After the warm-up; without the last digits of a product of decimal numbers."""
        return float(f"{self.base_learning_rate * self.global_batch_size:.12g}")


@dataclass(frozen=True)
class AssetsConfig:
    """Files in ``assets_dir``, by name, and the SHA-256 or SHA-1 that they must have, in hexadecimal; null for any.

    Attributes:
        checkpoint: has the VAE and the text tower that encodes captions.
        clip: has both towers of the CLIP that scores.
        inception: has FID's network.
        vocabulary: merges of the tokenizer.
    """

    checkpoint: str
    checkpoint_digest: str | None
    clip: str
    clip_digest: str | None
    inception: str
    inception_digest: str | None
    vocabulary: str


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How the network starts, and how operations run.

    Attributes:
        loss_scale: initial loss scale with fp16.
        loss_scale_interval: updates without overflow after which it doubles.
        loss_scale_hysteresis: overflows in a row at which it is halved.
        zero_std: standard deviation of normal values in place of the zeros that the last layer of every residual branch
            starts from: a bench asks for it, since a network with branches of zeros is faster than one that has
            trained. 0 in training.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    loss_scale: Annotated[float, Positive]
    loss_scale_interval: Annotated[int, AtLeast(1)]
    loss_scale_hysteresis: Annotated[int, AtLeast(1)]
    zero_std: Annotated[float, FiniteNotNegative] = 0.0
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class ReaderConfig:
    """How samples are read and pictures are made.

    Attributes:
        captions: ``encoded``: the data have them as the text tower encoded them; ``tokens``: it does so one batch ahead
            of training, beside it.
        shuffle_buffer: samples of a lane out of which the next one is drawn.
        threads: that read and unpack.
        prefetch: batches that they are ahead.
        eval_batch: pictures that one rank generates together.
    """

    captions: Literal["encoded", "tokens"]
    shuffle_buffer: Annotated[int, AtLeast(1)]
    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1)]
    eval_batch: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class StableDiffusionConfig:
    """All of it; ``vae``, ``text``, ``vision`` and ``inception`` are the sizes of the frozen networks."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
    assets: AssetsConfig
    vae: VaeSizes
    text: TextSizes
    vision: VisionSizes
    inception: InceptionSizes

    def __post_init__(self) -> None:
        facts = "benchmark.facts"
        for name, value, other, wanted in (
            (f"{facts}.image_size", self.facts.image_size, "latents times the VAE's factor", self._pixels),
            (f"{facts}.latent_channels", self.facts.latent_channels, "vae.latent_channels", self.vae.latent_channels),
            (f"{facts}.context_width", self.facts.context_width, "text.width", self.text.width),
            (f"{facts}.context_length", self.facts.context_length, "text.context", self.text.context),
            ("vision.embedding", self.vision.embedding, "text.embedding", self.text.embedding),
        ):
            if value != wanted:
                raise ConfigError(f"{name}={value}: not {other}, {wanted}")

    @property
    def _pixels(self) -> int:
        return self.facts.latent_size * self.vae.factor
