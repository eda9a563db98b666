"""An evaluation written out, one picture after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from benchmarks.stable_diffusion.clip_score import DEVIATION, MEAN
from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.sampler import initial_noise
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks
from tests.benchmarks.stable_diffusion.small_evaluation import ARCHITECTURE, GUIDANCE, PROMPTS, VISION, read_reference


@torch.no_grad()
def scores_by_hand(model: UNet, networks: ScoringNetworks, seed: int, root: Path) -> dict[str, float]:
    """Both halves of the guidance apart, Pillow's pictures, eigenvalues of a product that is not symmetric."""
    table, features, similarities = abar(), [], []
    transform = transforms.Compose(
        [
            transforms.Resize(VISION.resolution, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(VISION.resolution),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    empty = networks.conditioning.encode(networks.tokenize([""]))
    for number, prompt in enumerate(PROMPTS):
        tokens = networks.tokenize([prompt])
        context = networks.conditioning.encode(tokens)
        shape = (ARCHITECTURE.latent_channels, *[ARCHITECTURE.latent_size] * 2)
        x = initial_noise(torch.tensor(seed), torch.tensor([number]), shape, torch.float64)
        for t, lower in zip([751, 501, 251, 1], [501, 251, 1, 0], strict=True):
            v_u, v_c = (model(x, torch.tensor([t]), caption) for caption in (empty, context))
            v, share, lower_share = v_u + GUIDANCE * (v_c - v_u), float(table[t]), float(table[lower])
            x0 = share**0.5 * x - (1 - share) ** 0.5 * v
            eps = share**0.5 * v + (1 - share) ** 0.5 * x
            x = lower_share**0.5 * x0 + (1 - lower_share) ** 0.5 * eps
        image = ((networks.vae.decode(x / 0.18215) + 1) / 2).clamp(0, 1)
        features.append(networks.inception.features(image)[0].numpy())
        as_bytes = (image[0] * 255).numpy().astype(np.uint8).transpose(1, 2, 0)
        pixels = transform(Image.fromarray(as_bytes)).double()
        a, b = networks.vision.project(pixels[None])[0], networks.text.project(tokens)[0]
        similarities.append(float(a @ b / (a.norm() * b.norm())))
    reference = read_reference(root)
    mean, covariance = np.mean(features, 0), np.cov(np.stack(features), rowvar=False)
    shared = np.sqrt(np.linalg.eigvals(reference.covariance_FF @ covariance).real.clip(0)).sum()
    traces = np.trace(reference.covariance_FF + covariance)
    distance = np.square(mean - reference.mean_F).sum() + traces - 2 * shared
    return {"FID": float(distance), "CLIP": float(np.mean(similarities))}
