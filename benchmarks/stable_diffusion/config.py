"""Configuration keys of Stable Diffusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture
from benchmarks.stable_diffusion.unet_operations import OPERATIONS
from common.config.ranges import AtLeast, NotNegative, ShareAboveZero, ShareBelowOne
from common.config.sections import NetworkConfig, ThreadedReaderConfig
from common.errors import ConfigError
from common.optim.hparams import AdamWHparams


@dataclass(frozen=True)
class Facts(UNetArchitecture):
    """Dataset and model constants that the rules fix, besides the targets: the U-Net, the diffusion and the sampler.

    Attributes:
        image_size: height and width of pictures, px.
        times: number of diffusion steps.
        first_beta, last_beta: variance of the noise of the first and the last diffusion step.
        sampling_steps: sampler steps per generated picture.
        guidance: scale of classifier-free guidance.
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
    """The tunable hyperparameters: the rows for ``stable_diffusion`` in the table of the rules.

    Attributes:
        base_learning_rate: learning rate per sample; the logged rate of a step is ``global_batch_size`` times as high.
        warmup_steps: length W of the linear warm-up; afterwards the rate is constant.
        variant: formula of the warm-up. After n updates, ``reference`` has 1e-6 + (1 - 1e-6) n / W of the full rate,
            ``nvidia`` has (n + 1) / (W + 1).
    """

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]
    variant: Literal["nvidia", "reference"]

    @property
    def learning_rate(self) -> float:
        """Return the learning rate after the warm-up, rounded to 12 digits to hide binary rounding errors."""
        return float(f"{self.base_learning_rate * self.global_batch_size:.12g}")


@dataclass(frozen=True)
class AssetsConfig:
    """Names of files in ``assets_dir``, and the expected SHA-256 or SHA-1 in hexadecimal; null accepts any content.

    Attributes:
        checkpoint: file with the VAE and the text tower that encodes captions.
        clip: file with both towers of the CLIP that computes the score.
        inception: file with the network of FID.
        vocabulary: file with the tokenizer's merges.
    """

    checkpoint: str
    checkpoint_digest: str | None
    clip: str
    clip_digest: str | None
    inception: str
    inception_digest: str | None
    vocabulary: str


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Numerical options of the network, and the implementations of its operations.

    Attributes:
        loss_scale_interval: updates without overflow after which the scale doubles.
        loss_scale_hysteresis: consecutive overflows after which the scale is halved.
        zero_std: standard deviation of the normal values that replace the zero initialisation of the last layer of
            each residual branch. Speed measurements set it, because a network with zero branches is faster than a
            trained one. 0 in training.
    """

    operations = OPERATIONS
    loss_scale_interval: Annotated[int, AtLeast(1)]
    loss_scale_hysteresis: Annotated[int, AtLeast(1)]
    zero_std: Annotated[float, NotNegative] = 0.0


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(ThreadedReaderConfig):
    """Options of reading samples and of generating pictures.

    Attributes:
        captions: ``encoded``: the data contain captions encoded by the text tower; ``tokens``: the text tower encodes
            them during training, one batch ahead.
        shuffle_buffer: size in samples of the buffer from which a stream draws the next sample.
        eval_batch: pictures that one rank generates together.
    """

    captions: Literal["encoded", "tokens"]
    shuffle_buffer: Annotated[int, AtLeast(1)]
    eval_batch: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class StableDiffusionConfig:
    """Stable Diffusion's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`.

    Attributes:
        vae, text, vision, inception: sizes of the frozen networks.
    """

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
                raise ConfigError(f"{name}={value}: must equal {other}, {wanted}")

    @property
    def _pixels(self) -> int:
        return self.facts.latent_size * self.vae.factor
