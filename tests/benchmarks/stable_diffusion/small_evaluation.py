"""A small evaluation with the files of its frozen networks, alone and as one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.stable_diffusion.config import (
    AssetsConfig,
    Facts,
    ModelConfig,
    ReaderConfig,
    StableDiffusionConfig,
)
from benchmarks.stable_diffusion.evaluate import PicturesOfCaptions, generation_settings
from benchmarks.stable_diffusion.fid import FeatureStatistics
from benchmarks.stable_diffusion.frozen.published import save_clip, save_inception, save_stable_diffusion
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.scoring_networks import published_networks, random_networks
from benchmarks.stable_diffusion.synthetic_networks import small_merges
from common.contract.evaluation import Predictions, Weights
from common.distributed.layout import Layout
from tests.benchmarks.stable_diffusion.small_unet import ABAR, SMALL

PROMPTS = [f"{count} {colour} circles" for count, colour in enumerate(["red", "blue", "grey", "red", "pink", "b", "c"])]
ARCHITECTURE = replace(SMALL, latent_size=4, context_width=8, context_length=9)
VAE = VaeSizes(channels=4, multipliers=(1, 2), blocks=1, groups=2)
TEXT = TextSizes(vocabulary=530, context=9, width=8, layers=2, heads=2, mlp=16, embedding=6)
VISION = VisionSizes(resolution=6, patch=3, width=8, layers=2, heads=2, mlp=16, embedding=6)
INCEPTION = InceptionSizes(width_factor=1 / 32, resolution=75)
STEPS, GUIDANCE, BATCH, SEED = 4, 3.0, 3, 11


def small_config() -> StableDiffusionConfig:
    """Return a configuration with everything that an evaluation reads."""
    facts = Facts(
        **asdict(ARCHITECTURE),
        image_size=ARCHITECTURE.latent_size * VAE.factor,
        times=1000,
        first_beta=0.00085,
        last_beta=0.012,
        sampling_steps=STEPS,
        guidance=GUIDANCE,
    )
    reader = ReaderConfig(captions="encoded", shuffle_buffer=1, threads=1, prefetch=1, eval_batch=BATCH)
    assets = AssetsConfig("sd.ckpt", None, "clip.bin", None, "inception.pth", None, "merges.gz")
    model = ModelConfig(loss_scale=1.0, loss_scale_interval=1, loss_scale_hysteresis=1)
    return StableDiffusionConfig(facts, None, model, reader, assets, VAE, TEXT, VISION, INCEPTION)


def small_model(seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float64) -> UNet:
    """Return a network in which no parameter is zero."""
    generator = torch.Generator(device).manual_seed(seed)
    return UNet(ARCHITECTURE, generator=generator, device=device, dtype=dtype, zero_std=0.1)


@torch.no_grad()
def write_assets(folder: Path) -> None:
    """Write files of random networks in the published formats."""
    own = small_config()
    with torch.random.fork_rng():
        torch.manual_seed(7)  # random_networks draws from the global generator
        first, other = (random_networks(None, own, torch.device("cpu"), torch.float32) for _ in range(2))
        for (
            name,
            layer,
        ) in first.inception.named_modules():  # with PyTorch's defaults, activations vanish in so many layers
            if isinstance(layer, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(layer.weight)
            elif isinstance(layer, torch.nn.BatchNorm2d):
                layer.bias.fill_(0.5)
                layer.weight.fill_(2.0 if name.startswith("Mixed_7c") else 1.0)
        for parameter in first.vae.decoder.parameters():
            parameter.mul_(1.5)
    (folder / own.assets.vocabulary).write_bytes(small_merges(PROMPTS, TEXT.vocabulary - 514))
    save_stable_diffusion(folder / own.assets.checkpoint, first.vae, first.conditioning)
    save_clip(folder / own.assets.clip, other.text, first.vision)
    save_inception(folder / own.assets.inception, first.inception)


def ddim(
    x: Tensor, velocities: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], times: list[int], guidance: float
) -> Tensor:
    """Sample latents by DDIM's formula in float64 coefficients.

    Args:
        velocities: function of latents and times (N,) that returns the predictions without and with captions.
        times: start of each step, descending; the last step ends at 0.
    """
    for t, lower in zip(times, [*times[1:], 0], strict=True):
        v_u, v_c = velocities(x, torch.full((len(x),), t))
        v, share, lower_share = v_u + guidance * (v_c - v_u), float(ABAR[t]), float(ABAR[lower])
        x0 = share**0.5 * x - (1 - share) ** 0.5 * v
        eps = share**0.5 * v + (1 - share) ** 0.5 * x
        x = lower_share**0.5 * x0 + (1 - lower_share) ** 0.5 * eps
    return x


def read_prompts(root: Path) -> list[str]:
    return (root / "prompts.txt").read_text().splitlines()


def read_reference(root: Path) -> FeatureStatistics:
    with np.load(root / "statistics.npz") as file:
        return FeatureStatistics(file["mu"], file["sigma"])


def write_data(folder: Path, features: int, prompts: list[str] = PROMPTS) -> None:
    generator = np.random.default_rng(1)
    real = generator.standard_normal((40, features))
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    np.savez(folder / "statistics.npz", mu=real.mean(0), sigma=np.cov(real, rowvar=False))


def small_evaluation(
    folder: Path, model: UNet, layout: Layout | None = None, capture: bool = True
) -> PicturesOfCaptions:
    layout = layout or Layout(seed=SEED)
    own = small_config()
    networks = published_networks(own, folder, layout.device, next(model.parameters()).dtype)
    settings = generation_settings(own)
    return PicturesOfCaptions(model, networks, settings, len(PROMPTS), read_prompts, read_reference, layout, capture)


def weights_of(model: UNet) -> Weights:
    return Weights({name: parameter.detach() for name, parameter in model.named_parameters()})


def predicted(folder: Path, layout: Layout | None = None) -> Predictions | None:
    """Return the sums of an evaluation with other weights than the model's own."""
    evaluation = small_evaluation(folder, small_model(seed=0), layout)
    evaluation.warm_up()
    evaluation.open_data(folder)
    found = evaluation.predict(weights_of(small_model(seed=1)))
    evaluation.close()
    return found


def sums_of_rank(rank: int, ranks: int, _: str, folder: Path) -> dict[str, Any] | None:
    """Evaluate as one of several ranks; the first rank returns the sums of all."""
    found = predicted(folder, Layout({"dp": ranks}, rank, seed=SEED))
    return None if found is None else found.values
