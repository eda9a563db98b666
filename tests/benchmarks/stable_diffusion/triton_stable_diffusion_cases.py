"""Test the whole U-Net and the autoencoder with Triton's kernels in the interpreter."""

import pytest
import torch

from benchmarks.stable_diffusion.frozen.sizes import VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.unet_operations import OPERATIONS, choose_layers
from common.ops.operation import REFERENCE
from tests.benchmarks.stable_diffusion.public_names import randomized
from tests.benchmarks.stable_diffusion.small_unet import SMALL, inputs, small_unet


def test_unet_outputs_and_gradients_equal_the_references():
    names = dict.fromkeys(("group_norm", "layer_norm", "geglu", "bias_gradient"), "triton")
    model = UNet(SMALL, {**names, "upsampling": "transposed"})
    references = small_unet(torch.float32, implementations=dict.fromkeys(OPERATIONS, REFERENCE))
    model.load_state_dict(references.state_dict())
    found, wanted = (each(*inputs(1, torch.float32)) for each in (model, references))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for prediction in (found, wanted):
        prediction.square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), references.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert (a.grad - b.grad).norm() < 1e-4 * b.grad.norm(), name


SIZES = VaeSizes(channels=8, multipliers=(1, 2), blocks=1, groups=4)


@pytest.mark.usefixtures("poisoned_memory")
def test_moments_and_pictures_equal_the_references():
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
