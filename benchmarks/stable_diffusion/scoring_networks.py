"""The frozen networks of an evaluation: they condition the U-Net, decode its latents, and score pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.config import StableDiffusionConfig
from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.published import load_inception, load_text, load_vae, load_vision
from benchmarks.stable_diffusion.frozen.sizes import TextSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.unet_operations import choose_layers
from common.errors import ConfigError

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class ScoringNetworks:
    """The frozen networks of an evaluation, all on one device.

    Attributes:
        tokenize: function of captions that returns tokens (N, T) int64 on the host.
        conditioning: text tower whose second to last layer conditions the U-Net.
        vae: decoder of latents.
        inception: network of the FID features.
        text, vision: towers of the CLIP that compares captions with pictures.
    """

    tokenize: Callable[[Sequence[str]], Tensor]
    conditioning: TextTower
    vae: AutoencoderKL
    inception: Inception
    text: TextTower
    vision: VisionTower


def random_networks(
    tokenize: Callable[[Sequence[str]], Tensor], own: StableDiffusionConfig, device: torch.device, dtype: torch.dtype
) -> ScoringNetworks:
    """Return networks with random weights; callers may load published weights into them.

    The networks for generation (conditioning and autoencoder) have the U-Net's dtype. The scoring networks have fp32,
    or fp64 if ``dtype`` is fp64.

    Args:
        tokenize: function of captions that returns tokens (N, T) int64 on the host.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """
    scoring = torch.promote_types(dtype, torch.float32)

    def built(build: Callable[[], Network], dtype: torch.dtype) -> Network:
        with torch.device(device):
            network = build()
        return network.to(dtype).to(memory_format=torch.channels_last)

    on_device = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_device):  # do not advance the global generators
        networks = ScoringNetworks(
            tokenize,
            built(lambda: TextTower(own.text), dtype),
            built(lambda: AutoencoderKL(own.vae), dtype),
            built(lambda: Inception(own.inception.width_factor, own.inception.resolution), scoring),
            built(lambda: TextTower(own.text), scoring),
            built(lambda: VisionTower(own.vision), scoring),
        )
    choose_layers(networks.vae, own.model.implementations, dtype)
    return networks


def synthetic_networks(own: StableDiffusionConfig, device: torch.device, dtype: torch.dtype) -> ScoringNetworks:
    """Return networks with the configured sizes and random weights; their tokens do not depend on the captions."""
    return random_networks(functools.partial(random_tokens, own.text), own, device, dtype)


def random_tokens(sizes: TextSizes, captions: Sequence[str]) -> Tensor:
    """Return random tokens that fill half of the context: (N, T) int64 for N captions."""
    generator, end = torch.Generator().manual_seed(0), sizes.context // 2
    tokens_NT = torch.randint(sizes.vocabulary - 2, (len(captions), sizes.context), generator=generator)
    tokens_NT[:, 0], tokens_NT[:, end], tokens_NT[:, end + 1 :] = sizes.vocabulary - 2, sizes.vocabulary - 1, 0
    return tokens_NT


def published_networks(
    own: StableDiffusionConfig, assets_dir: Path | None, device: torch.device, dtype: torch.dtype
) -> ScoringNetworks:
    """Load the networks from ``assets_dir``, with the file names and digests of the configuration.

    Args:
        dtype: dtype of the U-Net.

    Raises:
        ConfigError: ``assets_dir`` is None.
        CheckpointError: a file does not match the configuration.
        DataError: the tokenizer's file does not match.
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """
    if assets_dir is None:
        raise ConfigError(
            "assets_dir=null: the evaluation reads the networks that generate and score pictures from "
            f"{own.assets.checkpoint}, {own.assets.clip} and {own.assets.inception} in this folder"
        )
    tokenize = ClipTokenizer(assets_dir / own.assets.vocabulary, own.text.vocabulary, own.text.context)
    networks = random_networks(tokenize, own, device, dtype)
    checkpoint, clip = assets_dir / own.assets.checkpoint, assets_dir / own.assets.clip
    load_text(checkpoint, own.assets.checkpoint_digest, networks.conditioning)
    load_vae(checkpoint, None, networks.vae)  # the digest of this large file was just checked
    load_text(clip, own.assets.clip_digest, networks.text)
    load_vision(clip, None, networks.vision)
    load_inception(assets_dir / own.assets.inception, own.assets.inception_digest, networks.inception)
    return networks
