"""The autoencoder on Triton's kernels, interpreted: what one layer leaves to be added, the next one's kernel adds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.stable_diffusion.frozen.sizes import VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.unet_operations import choose_layers
from tests.benchmarks.stable_diffusion.frozen_names import randomized

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = VaeSizes(channels=8, multipliers=(1, 2), blocks=1, groups=4)


def test_moments_and_pictures_are_those_of_the_references():
    network, references = AutoencoderKL(SIZES), AutoencoderKL(SIZES)
    for each in (network, references):
        randomized(each)
    chosen = choose_layers(network, {}, torch.float32)
    assert chosen == {"group_norm": "triton", "upsampling": "transposed"}
    images = torch.rand(2, 3, 6, 4, generator=torch.Generator().manual_seed(1))
    moments = references.encode_moments(images)
    torch.testing.assert_close(network.encode_moments(images), moments, rtol=1e-4, atol=1e-5)
    z = moments[:, : SIZES.latent_channels]
    torch.testing.assert_close(network.decode(z), references.decode(z), rtol=1e-4, atol=1e-5)
