"""Small frozen networks for synthetic data, fitted to the generated pictures within seconds on a CPU.

They replace the published networks in a demo, so that its scores are meaningful: the autoencoder reconstructs
pictures, and the CLIP score is high for a picture with its own caption and low with another caption. They are written
in the formats of the published files.

Legend: N pictures, S their side in pixels.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import torch.nn.functional as F
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.clip_score import ClipTransform, cosines, to_bytes
from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.diffusion import abar, sampling_times
from benchmarks.stable_diffusion.fid import FeatureStatistics, FrechetDistance, statistics_of_features
from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.clip_tokenizer import (
    BYTE_TOKENS,
    MARKS,
    ClipTokenizer,
    byte_characters,
    byte_symbols,
    merge_pair,
    words,
)
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.inference import freeze
from benchmarks.stable_diffusion.frozen.published import save_clip, save_inception, save_stable_diffusion
from benchmarks.stable_diffusion.frozen.sizes import (
    SMALL_INCEPTION,
    SMALL_TEXT,
    SMALL_VAE,
    SMALL_VISION,
    InceptionSizes,
    TextSizes,
    VaeSizes,
    VisionSizes,
)
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL, pictures_of
from common.config.loading import build
from common.data.options import Option, Options
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts

BATCH = 8
"""Pictures per step of :func:`fit_vae`."""
RATE = 4e-3
"""Adam's learning rate in :func:`fit_vae`, for all parameters except the weights of inner convolutions."""
MATRIX_RATE = 0.025
"""Muon's learning rate in :func:`fit_vae`, for the weights of inner convolutions. Muon needs fewer steps than Adam."""
MOMENTUM = 0.9
WARMUP_STEPS = 20
KL_WEIGHT = 1e-6
"""Weight in :func:`fit_vae` of the KL divergence of the latents from a standard normal; keeps a little latent noise."""
RIDGE = 1e-3
"""Regularisation of :func:`fit_clip`: fraction of the mean variance that is added to the variance of each feature."""
RETAINED = 0.5
"""Threshold of :func:`fit_clip` on the squared canonical correlation; weaker directions are dropped."""
SPREAD = 250.0
"""Target for the sum of variances of the Inception's features of real pictures. A FID of this size then means
pictures that have nothing in common with real ones, as with the published network.
"""
_FITTED_AT_ONCE, _SCORED_AT_ONCE = 256, 64  # pictures

_Made = TypeVar("_Made")
_Sizes = TypeVar("_Sizes", VaeSizes, TextSizes, VisionSizes, InceptionSizes)


def _sizes(name: str, kind: type[_Sizes]) -> Option:
    """Return the option for the sizes of a network, as a mapping such as ``{channels: 16}``."""

    def parsed(text: str) -> _Sizes:
        try:
            # OmegaConf parses YAML like Hydra: 1e-06 is a number
            read = OmegaConf.to_container(OmegaConf.create(f"{name}: {text}"))
            return build(kind, read[name], name)  # type: ignore[call-overload, index]
        except (ConfigError, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(f"--{name}={text}: {error}") from error

    return Option("sizes of the network as a mapping; '{}' for the published sizes", parse=parsed)


@dataclass(frozen=True)
class NetworkSizes(Options):
    """Options of ``generate`` for the sizes of the frozen networks."""

    vae: Annotated[VaeSizes, _sizes("vae", VaeSizes)] = SMALL_VAE
    text: Annotated[TextSizes, _sizes("text", TextSizes)] = SMALL_TEXT
    vision: Annotated[VisionSizes, _sizes("vision", VisionSizes)] = SMALL_VISION
    inception: Annotated[InceptionSizes, _sizes("inception", InceptionSizes)] = SMALL_INCEPTION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text.embedding != self.vision.embedding:
            raise ConfigError(f"--text and --vision: embeddings of {self.text.embedding} and {self.vision.embedding}")


@dataclass(frozen=True)
class SyntheticNetworks:
    """The frozen networks, in fp32 on the CPU.

    Attributes:
        tokenize: maps captions to tokens.
    """

    vae: AutoencoderKL
    text: TextTower
    vision: VisionTower
    inception: Inception
    tokenize: ClipTokenizer


@dataclass(frozen=True)
class Score:
    """FID and CLIP score of a set of pictures."""

    fid: float
    clip: float


def fitted_networks(
    images_N3SS: Tensor, captions: Sequence[str], sizes: NetworkSizes, assets: Path, vae_steps: int, seed: int
) -> SyntheticNetworks:
    """Fit all networks to pictures, and write them to ``assets`` in the published formats.

    Args:
        images_N3SS: pictures in [0, 1], preprocessed for the autoencoder.
        assets: an existing folder.
        vae_steps: training steps of the autoencoder.

    Raises:
        ConfigError: the captions are too few or too similar for the sizes.
    """
    vocabulary = assets / raw.VOCABULARY
    try:
        vocabulary.write_bytes(small_merges(captions, sizes.text.vocabulary - BYTE_TOKENS - MARKS))
        tokenize = ClipTokenizer(vocabulary, sizes.text.vocabulary, sizes.text.context)
        pixels = ClipTransform(sizes.vision.resolution, torch.float32)(to_bytes(images_N3SS.clamp(0, 1)))
        text, vision = fit_clip(pixels, captions, tokenize, sizes.text, sizes.vision, seed)
    except ValueError as error:
        raise ConfigError(f"the networks cannot be fitted to {len(captions)} captions: {error}") from error
    # Pictures in [0, 1] are encoded and decoded to [-1, 1]; with these targets, the whole chain reconstructs them.
    vae = fit_vae(images_N3SS, sizes.vae, vae_steps, seed, targets_N3HW=2 * images_N3SS - 1)
    inception = _scaled(random_inception(sizes.inception, seed), images_N3SS)
    save_stable_diffusion(assets / raw.CHECKPOINT, vae, text)
    save_clip(assets / raw.CLIP, text, vision)
    save_inception(assets / raw.INCEPTION, inception)
    return SyntheticNetworks(vae, text, vision, inception, tokenize)


def _scaled(network: Inception, images_N3SS: Tensor) -> Inception:
    """Scale all features to :data:`SPREAD`; they are proportional to the first norm's weight, as all shifts are 0."""
    spread = _features(network, images_N3SS).double().var(dim=0).sum()
    network.Conv2d_1a_3x3.bn.weight.mul_((SPREAD / spread).sqrt())
    return network


def statistics(network: Inception, images_N3SS: Tensor) -> FeatureStatistics:
    """Return the feature statistics of pictures in [0, 1]."""
    return statistics_of_features(_features(network, images_N3SS))


def scores(
    networks: SyntheticNetworks,
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
    networks: SyntheticNetworks, reference: FeatureStatistics, captions: Sequence[str]
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
    return torch.cat([function(part) for part in rows.split(_SCORED_AT_ONCE)])


def fit_vae(
    images_N3HW: Tensor, sizes: VaeSizes, steps: int, seed: int, targets_N3HW: Tensor | None = None
) -> AutoencoderKL:
    """Train an autoencoder, then scale its latents to mean 0 and standard deviation ``1 / sizes.scale`` per channel.

    Args:
        images_N3HW: float32 pictures of one size, the input of :meth:`AutoencoderKL.encode_moments`.
        steps: training steps of :data:`BATCH` pictures.
        seed: seed of weights, batches and noise. The same seed gives the same network on the same machine.
        targets_N3HW: targets of the decoder; None for the pictures themselves. The benchmark encodes [0, 1] and
            decodes to [-1, 1], so the two may differ.

    Returns:
        The frozen network in float32.
    """
    targets_N3HW = images_N3HW if targets_N3HW is None else targets_N3HW
    network = _seeded(seed, lambda: AutoencoderKL(sizes))
    generator = torch.Generator().manual_seed(seed)
    _start(network, images_N3HW, targets_N3HW, generator)
    inner = [p for n, p in network.named_parameters() if p.ndim == 4 and "conv_in" not in n and "conv_out" not in n]
    chosen = {id(parameter) for parameter in inner}
    others = [parameter for parameter in network.parameters() if id(parameter) not in chosen]
    momenta = [torch.zeros_like(parameter) for parameter in inner]
    adam = torch.optim.Adam(others, betas=(MOMENTUM, 0.95), fused=True)
    network.requires_grad_(True)
    for step in range(steps):
        factor = min(1.0, (step + 1) / WARMUP_STEPS, 2 * (steps - step) / steps)
        batch = torch.randint(len(images_N3HW), (BATCH,), generator=generator)
        with torch.enable_grad():
            loss = _autoencoder_loss(network, images_N3HW[batch], targets_N3HW[batch], generator)
            loss.backward()
        for group in adam.param_groups:
            group["lr"] = factor * RATE
        adam.step()
        for parameter, momentum in zip(inner, momenta, strict=True):
            _muon_step(parameter, momentum, factor * MATRIX_RATE)
        network.zero_grad()
    freeze(network)
    _standardize(network, images_N3HW)
    return network


def _start(network: AutoencoderKL, images_N3HW: Tensor, targets_N3HW: Tensor, generator: torch.Generator) -> None:
    """Initialise the weights so that a short training suffices.

    Residual branches start at zero; all other convolutions preserve the variance. The first convolution normalises
    the pictures, and the last one reproduces mean and standard deviation of the targets.
    """
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is not None
            module.bias.zero_()
            deviation = 0.0 if name.endswith(("conv2", "attn_1.proj_out")) else module.weight[0].numel() ** -0.5
            module.weight.copy_(deviation * torch.randn(module.weight.shape, generator=generator))
    first, last = network.encoder.conv_in, network.decoder.conv_out
    assert first.bias is not None
    assert last.bias is not None
    deviation_3, mean_3 = torch.std_mean(images_N3HW, dim=(0, 2, 3))
    first.weight /= deviation_3[:, None, None]
    first.bias -= first.weight.sum(dim=(2, 3)) @ mean_3
    deviation_3, mean_3 = torch.std_mean(targets_N3HW, dim=(0, 2, 3))
    last.weight *= deviation_3[:, None, None, None]
    last.bias += mean_3


def _muon_step(parameter: Tensor, momentum: Tensor, rate: float) -> None:
    """Update by the orthogonal matrix nearest to the averaged gradient (Muon and its constants, Jordan et al. 2024)."""
    assert parameter.grad is not None
    momentum.lerp_(parameter.grad, 1 - MOMENTUM)
    direction = parameter.grad.lerp(momentum, MOMENTUM).flatten(1)
    tall = direction.shape[0] > direction.shape[1]
    direction = direction.T if tall else direction
    direction = direction / (direction.norm() + 1e-7)
    for _ in range(4):
        square = direction @ direction.T
        direction = 3.4445 * direction + (-4.7750 * square + 2.0315 * square @ square) @ direction
    direction = direction.T if tall else direction
    stretch = max(1.0, direction.shape[0] / direction.shape[1]) ** 0.5
    with torch.no_grad():
        parameter.sub_(direction.reshape(parameter.shape), alpha=rate * stretch)


def _autoencoder_loss(network: AutoencoderKL, images: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    mean, log_variance = network.encode_moments(images).chunk(2, dim=1)
    log_variance = log_variance.clamp(-30, 20)
    noise = torch.randn(mean.shape, generator=generator)
    decoded = network.decode(mean + (0.5 * log_variance).exp() * noise)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    return F.l1_loss(decoded, targets) + F.mse_loss(decoded, targets) + KL_WEIGHT * divergence.mean()


def _standardize(network: AutoencoderKL, images_N3HW: Tensor) -> None:
    """Shift and scale the latents, inside the two 1x1 convolutions; decoded pictures stay the same."""
    means = torch.cat([network.encode_moments(part).chunk(2, dim=1)[0] for part in images_N3HW.split(_FITTED_AT_ONCE)])
    deviation, mean = torch.std_mean(means, dim=(0, 2, 3))
    factor = 1 / (network.sizes.scale * deviation)
    channels = network.sizes.latent_channels
    before, after = network.quant_conv, network.post_quant_conv
    assert before.bias is not None
    assert after.bias is not None
    before.bias[:channels] = (before.bias[:channels] - mean) * factor
    before.weight[:channels] *= factor[:, None, None, None]
    before.bias[channels:] += 2 * factor.log()
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight /= factor[None, :, None, None]


def fit_clip(
    pixels_N3HW: Tensor,
    captions: Sequence[str],
    tokenizer: ClipTokenizer,
    text: TextSizes,
    vision: VisionSizes,
    seed: int,
) -> tuple[TextTower, VisionTower]:
    """Return random towers whose projections are fitted to pictures and their captions, in closed form.

    The features of both towers, without the direction of their mean, are projected to their canonical correlates
    (Hotelling 1936), the directions that pictures and captions share. Thus a picture and its own caption have a high
    cosine, and other pairs one around 0.

    Args:
        pixels_N3HW: float32, resized and normalised as for the CLIP score.
        captions: captions of the N pictures.
        tokenizer: tokenizer with ``text.vocabulary`` tokens.
        text, vision: sizes, with the same ``embedding``.

    Returns:
        Both frozen towers in float32.

    Raises:
        ValueError: captions and pictures are not correlated.
    """
    texts, pictures = _seeded(seed, lambda: (TextTower(text), VisionTower(vision)))
    tokens = tokenizer(captions)
    features_NW = [
        torch.cat([texts.pooled(part) for part in tokens.split(_FITTED_AT_ONCE)]).double(),
        torch.cat([pictures.pooled(part) for part in pixels_N3HW.split(_FITTED_AT_ONCE)]).double(),
    ]
    kept = [_without_mean(features) for features in features_NW]
    whitening = [_inverse_root(basis.T @ _covariance(f, f) @ basis) for f, basis in zip(features_NW, kept, strict=True)]
    crossed = kept[0].T @ _covariance(*features_NW) @ kept[1]
    left, correlations, right = torch.linalg.svd(whitening[0] @ crossed @ whitening[1])
    count = min(text.embedding, int((correlations.square() > RETAINED).sum()))
    if not count:
        raise ValueError(f"captions and pictures are not correlated: at most {correlations[0]:.2f}")
    directions = (left[:, :count], right[:count].T)
    for parameter, basis, white, chosen in zip(
        (texts.text_projection, pictures.proj), kept, whitening, directions, strict=True
    ):
        parameter.zero_()
        parameter[:, :count] = basis @ white @ chosen
    return texts, pictures


def _seeded(seed: int, make: Callable[[], _Made]) -> _Made:
    """Call ``make`` with PyTorch's CPU generator seeded, then restore the generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _without_mean(features_NW: Tensor) -> Tensor:
    """Return (W, W - 1) orthonormal directions, all orthogonal to the mean of the features."""
    mean = features_NW.mean(dim=0, keepdim=True)
    return torch.linalg.svd(mean, full_matrices=True).Vh[1:].T


def _covariance(left_NW: Tensor, right_NV: Tensor) -> Tensor:
    return (left_NW - left_NW.mean(dim=0)).T @ (right_NV - right_NV.mean(dim=0)) / len(left_NW)


def _inverse_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors @ torch.diag((values.clamp(min=0) + RIDGE * values.mean()).rsqrt()) @ vectors.T


def random_inception(sizes: InceptionSizes, seed: int) -> Inception:
    """Return a frozen Inception with random weights; its features still distinguish sets of pictures."""
    return _seeded(seed, lambda: Inception(sizes.width_factor, sizes.resolution))


def small_merges(captions: Sequence[str], count: int) -> bytes:
    """Return a file of merges in the published layout, with the most frequent pairs of ``captions``.

    Args:
        count: number of pairs; the vocabulary has 514 tokens more.

    Raises:
        ValueError: the captions have fewer pairs.
    """
    characters = byte_characters()
    found = Counter(word for caption in captions for word in words(caption.lower()))
    split = {word: byte_symbols(word, characters) for word in found}
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        seen: Counter[tuple[str, str]] = Counter()
        for word, symbols in split.items():
            for pair in pairwise(symbols):
                seen[pair] += found[word]
        if not seen:
            raise ValueError(f"the captions have {len(pairs)} pairs to merge, fewer than the required {count}")
        best = min(seen, key=lambda pair: (-seen[pair], pair))
        pairs.append(best)
        split = {word: merge_pair(symbols, best) for word, symbols in split.items()}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in pairs), ""]
    return gzip.compress("\n".join(lines).encode("utf-8"), mtime=0)
