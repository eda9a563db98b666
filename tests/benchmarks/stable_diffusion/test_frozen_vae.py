"""Test the autoencoder against diffusers'."""

import pytest
import torch

from benchmarks.stable_diffusion.frozen.sizes import VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.unet_operations import choose_layers
from common.errors import ConfigError
from common.nn.frozen import frozen_names
from common.ops.operation import AUTO
from tests.benchmarks.stable_diffusion.public_names import randomized, vae_of_diffusers
from tests.capturable import Capturable

SIZES = VaeSizes(channels=8, multipliers=(1, 2, 2), blocks=2, latent_channels=3, groups=4)


@pytest.fixture(scope="module")
def vae():
    network = AutoencoderKL(SIZES).double()
    randomized(network)
    return network


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_published_network_has_its_number_of_parameters():
    with torch.device("meta"):
        network = AutoencoderKL(VaeSizes())
        shapes = (
            network.encode_moments(torch.empty(1, 3, 512, 512)).shape,
            network.decode(torch.empty(1, 4, 64, 64)).shape,
        )

    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}

    assert counts == {"encoder": 34_163_592, "decoder": 49_490_179, "quant_conv": 72, "post_quant_conv": 20}
    assert sum(counts.values()) == 83_653_863
    assert shapes == ((1, 8, 64, 64), (1, 3, 512, 512))
    assert VaeSizes().factor == 8


@pytest.mark.parametrize("upsampling", [AUTO, "reference"])
def test_moments_pictures_and_gradients_equal_diffusers(vae, images, upsampling):
    """Both implementations of upsampling add all pending biases; synthetic data train the autoencoder."""
    diffusers = pytest.importorskip("diffusers")
    levels = len(SIZES.multipliers)
    theirs = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(SIZES.channels * multiplier for multiplier in SIZES.multipliers),
        layers_per_block=SIZES.blocks,
        latent_channels=SIZES.latent_channels,
        norm_num_groups=SIZES.groups,
    ).double()
    theirs.load_state_dict(vae_of_diffusers(vae.state_dict(), levels))
    network = AutoencoderKL(SIZES).double()
    network.load_state_dict(vae.state_dict())
    network.requires_grad_(True)
    chosen = choose_layers(network, {"upsampling": upsampling}, torch.float64)
    assert chosen == {
        "group_norm": "reference",
        "upsampling": "transposed_library" if upsampling == AUTO else upsampling,
    }

    with Capturable():
        moments = network.encode_moments(images)
        decoded = network.decode(moments[:, :3])
        decoded.square().sum().backward()
    expected = theirs.encode(images).latent_dist.parameters
    pictures = theirs.decode(expected[:, :3]).sample
    pictures.square().sum().backward()

    assert moments.shape == (2, 6, 4, 6)
    torch.testing.assert_close(moments, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(decoded, pictures, rtol=1e-9, atol=1e-9)
    gradients = vae_of_diffusers({name: p.grad for name, p in network.named_parameters()}, levels)
    torch.testing.assert_close(gradients, {name: p.grad for name, p in theirs.named_parameters()})


def test_channels_last_memory_gives_the_same_pictures(vae, images):
    expected = vae.decode(vae.encode_moments(images)[:, :3])
    network = AutoencoderKL(SIZES).double()
    network.load_state_dict(vae.state_dict())
    network.to(memory_format=torch.channels_last)

    given = images.to(memory_format=torch.channels_last)
    decoded = network.decode(network.encode_moments(given)[:, :3])

    assert torch.equal(given, images)
    assert decoded.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(decoded, expected)


def test_bf16_decodes_within_its_rounding(vae, images):
    expected = vae.decode(vae.encode_moments(images)[:, :3])
    network = AutoencoderKL(SIZES).bfloat16()
    network.load_state_dict(vae.state_dict())

    decoded = network.decode(vae.encode_moments(images)[:, :3].bfloat16())

    assert decoded.dtype == torch.bfloat16
    error = (decoded.double() - expected).square().mean().sqrt() / expected.std()
    assert error < 0.05


def test_the_autoencoder_is_frozen(vae):
    assert frozen_names(vae) == set(vae.state_dict())
    assert not any(parameter.requires_grad for parameter in vae.parameters())
    assert not vae.training


def test_groups_that_do_not_divide_channels_are_refused():
    with pytest.raises(ConfigError, match=r"vae\.channels=12: a multiple of vae\.groups=8"):
        VaeSizes(channels=12, groups=8)
