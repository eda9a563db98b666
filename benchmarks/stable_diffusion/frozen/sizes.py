"""Sizes of the frozen networks. Defaults are the published sizes; ``SMALL_*`` are for synthetic data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast, Each, Positive
from common.errors import ConfigError

Count = Annotated[int, AtLeast(1)]


def _divided(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise ConfigError(f"{name}={value}: a multiple of {by_name}={by}")


@dataclass(frozen=True)
class VaeSizes:
    """Sizes of the autoencoder.

    Attributes:
        channels: channels at full resolution.
        multipliers: channels of each level, in ``channels``; each level except the last halves height and width.
        blocks: residual blocks per level of the encoder; the decoder has one more.
        latent_channels: channels of the latents; moments have twice as many.
        groups, epsilon: groups and epsilon of all group norms.
        scale: factor that is applied to latents before noise is added.
    """

    channels: Count = 128
    multipliers: Annotated[tuple[int, ...], Each(AtLeast(1))] = (1, 2, 4, 4)
    blocks: Count = 2
    latent_channels: Count = 4
    groups: Count = 32
    epsilon: Annotated[float, Positive] = 1e-6
    scale: Annotated[float, Positive] = 0.18215

    def __post_init__(self) -> None:
        if not self.multipliers:
            raise ConfigError("vae.multipliers=[]: at least one level")
        _divided("vae.channels", self.channels, "vae.groups", self.groups)

    @property
    def factor(self) -> int:
        """Return the ratio of picture size to latent size, per side."""
        return 2 ** (len(self.multipliers) - 1)


@dataclass(frozen=True)
class TextSizes:
    """Sizes of CLIP's text tower.

    Attributes:
        vocabulary: number of tokens; the last two mark the start and the end of a text.
        context: tokens per text, C.
        width: features per token, W.
        layers: transformer blocks; the U-Net is conditioned on the output of the second to last.
        heads: heads per attention.
        mlp: hidden features of an MLP.
        embedding: features of the projection, E; the same as in the vision tower.
    """

    vocabulary: Annotated[
        int, AtLeast(514, "at least 514: all bytes, inside and at the end of a word, and two marks")
    ] = 49408
    context: Annotated[int, AtLeast(2)] = 77
    width: Count = 1024
    layers: Annotated[int, AtLeast(2, "at least 2: conditioning leaves out the last")] = 24
    heads: Count = 16
    mlp: Count = 4096
    embedding: Count = 1024

    def __post_init__(self) -> None:
        _divided("text.width", self.width, "text.heads", self.heads)


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of CLIP's vision tower, a ViT.

    Attributes:
        resolution: height and width of a picture, px.
        patch: height and width of a patch, px.
        width: features per token.
        layers: transformer blocks.
        heads: heads per attention.
        mlp: hidden features of an MLP.
        embedding: features of the projection, E; the same as in the text tower.
    """

    resolution: Count = 224
    patch: Count = 14
    width: Count = 1280
    layers: Count = 32
    heads: Count = 16
    mlp: Count = 5120
    embedding: Count = 1024

    def __post_init__(self) -> None:
        _divided("vision.width", self.width, "vision.heads", self.heads)
        _divided("vision.resolution", self.resolution, "vision.patch", self.patch)


@dataclass(frozen=True)
class InceptionSizes:
    """Sizes of FID's Inception network.

    Attributes:
        width_factor: multiplier of all channels, a multiple of 1/32; 1 gives 2,048 features.
        resolution: height and width that pictures are resized to, px.
    """

    width_factor: Annotated[float, Positive] = 1.0
    resolution: Annotated[int, AtLeast(75, "at least 75 px, or nothing is left before the last pooling")] = 299

    def __post_init__(self) -> None:
        if not (32 * self.width_factor).is_integer():  # channels of all concatenations are multiples of 32
            raise ConfigError(f"inception.width_factor={self.width_factor}: a multiple of 1/32")


SMALL_VAE = VaeSizes(channels=16, multipliers=(1, 2, 2), blocks=1, groups=4)
SMALL_TEXT = TextSizes(vocabulary=514 + 32, width=64, layers=3, heads=4, mlp=128, embedding=32)
SMALL_VISION = VisionSizes(resolution=32, patch=8, width=64, layers=2, heads=4, mlp=128, embedding=32)
SMALL_INCEPTION = InceptionSizes(width_factor=1 / 16, resolution=75)
