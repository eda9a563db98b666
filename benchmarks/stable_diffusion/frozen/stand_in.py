"""Small frozen networks for stand-in data: fitted to the generated pictures in seconds, on a CPU.

They take the published networks' places in a demo, so that its whole chain has something to say: the autoencoder gives
back what it is given, and the CLIP score of a picture with its own caption is high, with another's low.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.freezing import freeze
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.frozen.text import TextTower
from benchmarks.stable_diffusion.frozen.tokenizer import Tokenizer, byte_characters, byte_symbols, merge_pair, words
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.frozen.vision import VisionTower

BATCH = 8
"""Pictures of a step of :func:`fit_vae`."""
RATE = 4e-3
"""Adam's learning rate in :func:`fit_vae`, for all but the inner convolutions' weights."""
MATRIX_RATE = 0.025
"""Muon's learning rate in :func:`fit_vae`, for those: it needs a fraction of Adam's steps."""
MOMENTUM = 0.9
WARMUP_STEPS = 20
KL_WEIGHT = 1e-6
"""Of the latents' divergence from a standard normal, in :func:`fit_vae`: they keep some noise, and far below them."""
RIDGE = 1e-3
"""Share of the mean variance that :func:`fit_clip` adds to each feature's."""
RETAINED = 0.5
"""Squared canonical correlation from which on :func:`fit_clip` takes a direction."""
_CHUNK = 256

Made = TypeVar("Made")


def fit_vae(
    images_N3HW: Tensor, sizes: VaeSizes, steps: int, seed: int, targets_N3HW: Tensor | None = None
) -> AutoencoderKL:
    """Train an autoencoder; its latents then have, in every channel, mean 0 and deviation ``1 / sizes.scale``.

    Args:
        images_N3HW: float32 pictures that :meth:`AutoencoderKL.encode_moments` will be given, of one size.
        sizes: of the network.
        steps: of :data:`BATCH` pictures each.
        seed: of weights, batches and noise: the same numbers give the same network on the same machine.
        targets_N3HW: what decoding is to give; the pictures themselves if None. (A chain that encodes [0, 1] and
            decodes to [-1, 1], as the benchmark's does, may want both.)

    Returns:
        The network in float32, frozen.
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
    """Weights from which a short training reaches far.

    Residual branches begin as nothing, all other convolutions keep the variance; the first sees pictures of mean 0 and
    deviation 1, and the last gives the mean and the deviation of the targets.
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
    """Move by the nearest orthogonal matrix to the gradient's average (Muon, Jordan et al. 2024: also the numbers)."""
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
    """Shift and scale the latents inside the two 1x1 convolutions, which leaves what is decoded as it was."""
    means = torch.cat([network.encode_moments(part).chunk(2, dim=1)[0] for part in images_N3HW.split(_CHUNK)])
    deviation, mean = torch.std_mean(means, dim=(0, 2, 3))
    factor = 1 / (network.sizes.scale * deviation)
    channels = network.sizes.latent_channels
    before, behind = network.quant_conv, network.post_quant_conv
    assert before.bias is not None
    assert behind.bias is not None
    before.bias[:channels] = (before.bias[:channels] - mean) * factor
    before.weight[:channels] *= factor[:, None, None, None]
    before.bias[channels:] += 2 * factor.log()
    behind.bias += behind.weight[:, :, 0, 0] @ mean
    behind.weight /= factor[None, :, None, None]


def fit_clip(
    pixels_N3HW: Tensor,
    captions: Sequence[str],
    tokenizer: Tokenizer,
    text: TextSizes,
    vision: VisionSizes,
    seed: int,
) -> tuple[TextTower, VisionTower]:
    """Random towers whose two projections are fitted to pictures and their captions, in closed form.

    Both sides' features, without the direction of their mean, are projected to their canonical correlates (Hotelling
    1936): directions in which a picture tells what its caption says. So a picture and its own caption get a high
    cosine, others one around 0.

    Args:
        pixels_N3HW: float32, resized and normalised as the CLIP score gives them to the tower.
        captions: of the N pictures.
        tokenizer: of ``text.vocabulary`` tokens.
        text, vision: sizes, of the same embedding.
        seed: of the weights.

    Returns:
        Both towers in float32, frozen.

    Raises:
        ValueError: nothing in the captions can be told from the pictures, or the sizes have different embeddings.
    """
    if text.embedding != vision.embedding:
        raise ValueError(f"embeddings of {text.embedding} and {vision.embedding} features cannot be compared")
    texts, pictures = _seeded(seed, lambda: (TextTower(text), VisionTower(vision)))
    tokens = tokenizer(captions)
    features_NW = [
        torch.cat([texts.pooled(part) for part in tokens.split(_CHUNK)]).double(),
        torch.cat([pictures.pooled(part) for part in pixels_N3HW.split(_CHUNK)]).double(),
    ]
    kept = [_without_mean(features) for features in features_NW]
    whitening = [_inverse_root(basis.T @ _covariance(f, f) @ basis) for f, basis in zip(features_NW, kept, strict=True)]
    crossed = kept[0].T @ _covariance(*features_NW) @ kept[1]
    left, correlations, right = torch.linalg.svd(whitening[0] @ crossed @ whitening[1])
    count = min(text.embedding, int((correlations.square() > RETAINED).sum()))
    if not count:
        raise ValueError(f"no caption can be told from its picture: correlations are up to {correlations[0]:.2f}")
    directions = (left[:, :count], right[:count].T)
    for parameter, basis, white, chosen in zip(
        (texts.text_projection, pictures.proj), kept, whitening, directions, strict=True
    ):
        parameter.zero_()
        parameter[:, :count] = basis @ white @ chosen
    return texts, pictures


def _seeded(seed: int, make: Callable[[], Made]) -> Made:
    """What ``make`` makes of PyTorch's random numbers from ``seed`` on, whose state then is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _without_mean(features_NW: Tensor) -> Tensor:
    """(W, W - 1) orthonormal directions in which the features' mean is 0."""
    mean = features_NW.mean(dim=0, keepdim=True)
    return torch.linalg.svd(mean, full_matrices=True).Vh[1:].T


def _covariance(left_NW: Tensor, right_NV: Tensor) -> Tensor:
    return (left_NW - left_NW.mean(dim=0)).T @ (right_NV - right_NV.mean(dim=0)) / len(left_NW)


def _inverse_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors @ torch.diag((values.clamp(min=0) + RIDGE * values.mean()).rsqrt()) @ vectors.T


def made_inception(sizes: InceptionSizes, seed: int) -> Inception:
    """An Inception of random weights, frozen: its features still tell sets of pictures apart."""
    return _seeded(seed, lambda: Inception(sizes.width_factor, sizes.resolution))


def small_merges(captions: Sequence[str], count: int) -> bytes:
    """A merges file in the published layout, its pairs the most frequent of ``captions``.

    Args:
        captions: texts.
        count: pairs; a vocabulary has 514 tokens more.

    Raises:
        ValueError: the captions have fewer.
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
            raise ValueError(f"the captions have {len(pairs)} pairs to merge, and {count} are asked for")
        best = min(seen, key=lambda pair: (-seen[pair], pair))
        pairs.append(best)
        split = {word: merge_pair(symbols, best) for word, symbols in split.items()}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in pairs), ""]
    return gzip.compress("\n".join(lines).encode("utf-8"), mtime=0)
