"""The frozen networks of synthetic data: fitted to the pictures, and written in the formats of the published files.

Legend: N pictures, S their side in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.clip_score import ClipTransform, cosines, to_bytes
from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.diffusion import abar, sampling_times
from benchmarks.stable_diffusion.fid import FeatureStatistics, FrechetDistance, statistics_of_features
from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.published import save_clip, save_inception, save_stable_diffusion
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.frozen.stand_in import fit_clip, fit_vae, made_inception, small_merges
from benchmarks.stable_diffusion.frozen.tokenizer import BYTE_TOKENS, MARKS, Tokenizer
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL, pictures_of
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts

SPREAD = 250.0
"""Target for the sum of variances of the Inception's features of real pictures. A FID of this size then means
pictures that have nothing in common with real ones, as with the published network.
"""
_CHUNK = 64


@dataclass(frozen=True)
class StandInNetworks:
    """The frozen networks, in fp32 on the CPU.

    Attributes:
        tokenize: maps captions to tokens.
    """

    vae: AutoencoderKL
    text: TextTower
    vision: VisionTower
    inception: Inception
    tokenize: Tokenizer


@dataclass(frozen=True)
class Sizes:
    """Sizes of the networks."""

    vae: VaeSizes
    text: TextSizes
    vision: VisionSizes
    inception: InceptionSizes


@dataclass(frozen=True)
class Score:
    """FID and CLIP score of a set of pictures."""

    fid: float
    clip: float


def fitted_networks(
    images_N3SS: Tensor, captions: Sequence[str], sizes: Sizes, assets: Path, vae_steps: int, seed: int
) -> StandInNetworks:
    """Fit all networks to pictures, and write them to ``assets`` in the published formats.

    Args:
        images_N3SS: pictures in [0, 1], preprocessed for the autoencoder.
        captions: captions of the N pictures.
        assets: an existing folder.
        vae_steps: training steps of the autoencoder.
        seed: determines all random choices.

    Raises:
        ConfigError: the captions are too few or too similar for the sizes.
    """
    vocabulary = assets / raw.VOCABULARY
    try:
        vocabulary.write_bytes(small_merges(captions, sizes.text.vocabulary - BYTE_TOKENS - MARKS))
        tokenize = Tokenizer(vocabulary, sizes.text.vocabulary, sizes.text.context)
        pixels = ClipTransform(sizes.vision.resolution, torch.float32)(to_bytes(images_N3SS.clamp(0, 1)))
        text, vision = fit_clip(pixels, captions, tokenize, sizes.text, sizes.vision, seed)
    except ValueError as error:
        raise ConfigError(f"the networks cannot be fitted to {len(captions)} captions: {error}") from error
    # Pictures in [0, 1] are encoded and decoded to [-1, 1]; with these targets, the whole chain reconstructs them.
    vae = fit_vae(images_N3SS, sizes.vae, vae_steps, seed, targets_N3HW=2 * images_N3SS - 1)
    inception = _spread(made_inception(sizes.inception, seed), images_N3SS)
    save_stable_diffusion(assets / raw.CHECKPOINT, vae, text)
    save_clip(assets / raw.CLIP, text, vision)
    save_inception(assets / raw.INCEPTION, inception)
    return StandInNetworks(vae, text, vision, inception, tokenize)


def _spread(network: Inception, images_N3SS: Tensor) -> Inception:
    """Scale all features. They are proportional to the weight of the first norm, because all shifts are zero."""
    spread = _features(network, images_N3SS).double().var(dim=0).sum()
    network.Conv2d_1a_3x3.bn.weight.mul_((SPREAD / spread).sqrt())
    return network


def statistics(network: Inception, images_N3SS: Tensor) -> FeatureStatistics:
    """Return the feature statistics of pictures in [0, 1]."""
    return statistics_of_features(_features(network, images_N3SS))


def scores(
    networks: StandInNetworks,
    reference: FeatureStatistics,
    images_N3SS: Tensor,
    captions: Sequence[str],
    latent_size: int,
    seed: int,
) -> dict[str, Score]:
    """Return scores that bound those of a run, by kind of pictures.

    Args:
        reference: statistics of other pictures than these.
        images_N3SS: pictures in [0, 1].
        captions: captions of the N pictures.
        latent_size: height and width of a latent.
        seed: seed of the sampler's initial noise.
    """
    judge = _judge(networks, reference, captions)
    shuffled = [*captions[1:], *captions[:1]]
    decoded = _decoded(networks.vae, networks.vae.encode_moments(images_N3SS)[:, : networks.vae.sizes.latent_channels])
    shape = (len(images_N3SS), networks.vae.sizes.latent_channels, latent_size, latent_size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    untrained = _decoded(networks.vae, _untrained_factor() * noise / networks.vae.sizes.scale)
    return {
        "real pictures": judge(images_N3SS),
        "through the autoencoder": judge(decoded),
        "with shuffled captions": _judge(networks, reference, shuffled)(images_N3SS),
        "of an untrained U-Net": judge(untrained),
    }


def _judge(
    networks: StandInNetworks, reference: FeatureStatistics, captions: Sequence[str]
) -> Callable[[Tensor], Score]:
    distance = FrechetDistance(reference)
    embedded_NE = networks.text.project(networks.tokenize(captions))
    transform = ClipTransform(networks.vision.sizes.resolution, torch.float32)

    def judge(images_N3SS: Tensor) -> Score:
        pixels = transform(to_bytes(images_N3SS.clamp(0, 1)))
        clip = cosines(_in_parts(networks.vision.project, pixels), embedded_NE).double().mean()
        return Score(distance(statistics(networks.inception, images_N3SS)), float(clip))

    return judge


def _untrained_factor() -> float:
    """Return the total factor that the sampler applies to its noise if the network predicts 0, as before training."""
    facts = fixed_facts(Facts, "stable_diffusion")
    times = sampling_times(abar(facts.times, facts.first_beta, facts.last_beta), facts.sampling_steps)
    signal, noise = (times.abar_S * times.previous_S).sqrt(), ((1 - times.abar_S) * (1 - times.previous_S)).sqrt()
    return float((signal + noise).prod())


def _decoded(vae: AutoencoderKL, means_NChw: Tensor) -> Tensor:
    return _in_parts(lambda part: pictures_of(part, vae), vae.sizes.scale * means_NChw)


def _features(network: Inception, images_N3SS: Tensor) -> Tensor:
    return _in_parts(network.features, images_N3SS)


def _in_parts(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return torch.cat([function(part) for part in rows.split(_CHUNK)])
