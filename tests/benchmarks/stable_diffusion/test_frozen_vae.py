"""Test the autoencoder against plain formulas and diffusers."""

import numpy as np
import pytest
import torch

from benchmarks.stable_diffusion.frozen.sizes import VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.unet_operations import choose_layers
from common.errors import ConfigError
from common.nn.frozen import frozen_names
from common.ops.operation import AUTO
from tests.benchmarks.stable_diffusion.plain_vae import PlainVae
from tests.benchmarks.stable_diffusion.public_names import randomized, vae_of_diffusers
from tests.capturable import Capturable

SIZES = VaeSizes(channels=8, multipliers=(1, 2, 2), blocks=2, latent_channels=3, groups=4, epsilon=1e-3)


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
def test_moments_and_pictures_equal_plain_formulas(vae, images, upsampling):
    """Both implementations of upsampling add all pending biases."""
    plain = PlainVae(vae.state_dict(), len(SIZES.multipliers), SIZES.blocks, SIZES.groups, SIZES.epsilon)
    network = AutoencoderKL(SIZES).double()
    network.load_state_dict(vae.state_dict())
    chosen = choose_layers(network, {"upsampling": upsampling}, torch.float64)

    with Capturable():
        moments = network.encode_moments(images)
        decoded = network.decode(moments[:, :3])

    expected = {AUTO: "transposed_library"}.get(upsampling, upsampling)
    assert chosen == {"group_norm": "reference", "upsampling": expected}

    assert moments.shape == (2, 6, 4, 6)
    assert decoded.shape == images.shape
    np.testing.assert_allclose(moments.numpy(), plain.encode(images.numpy()), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(decoded.numpy(), plain.decode(moments[:, :3].numpy()), rtol=1e-10, atol=1e-10)


def test_moments_and_pictures_equal_diffusers(images):
    diffusers = pytest.importorskip("diffusers")
    sizes = VaeSizes(
        channels=8, multipliers=(1, 2, 2), blocks=2, latent_channels=3, groups=4
    )  # epsilon as in diffusers
    ours = AutoencoderKL(sizes).double()
    randomized(ours)
    levels = len(sizes.multipliers)
    theirs = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(sizes.channels * multiplier for multiplier in sizes.multipliers),
        layers_per_block=sizes.blocks,
        latent_channels=sizes.latent_channels,
        norm_num_groups=sizes.groups,
    ).double()
    theirs.load_state_dict(vae_of_diffusers(ours.state_dict(), levels))

    with torch.no_grad():
        moments = theirs.encode(images).latent_dist.parameters
        decoded = theirs.decode(moments[:, :3]).sample

    torch.testing.assert_close(ours.encode_moments(images), moments, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.decode(moments[:, :3]), decoded, rtol=1e-9, atol=1e-9)


def test_inputs_are_not_changed(vae, images):
    given, latents = images.clone(), torch.rand(2, 3, 4, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    kept = latents.clone()

    vae.encode_moments(given.to(memory_format=torch.channels_last))
    vae.decode(latents)

    assert torch.equal(given, images)
    assert torch.equal(latents, kept)


def test_gradients_equal_finite_differences(images):
    """Synthetic data train the autoencoder, so pending biases need gradients too."""
    network = AutoencoderKL(VaeSizes(channels=2, multipliers=(1, 2), blocks=1, latent_channels=1, groups=1)).double()
    randomized(network)
    network.requires_grad_(True)
    small = images[:1, :, :4, :4]

    def loss():
        return network.decode(network.encode_moments(small)[:, :1]).square().sum()

    with torch.enable_grad():
        loss().backward()
    generator = torch.Generator().manual_seed(4)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in network.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(network.parameters(), direction, strict=True)).item()
    assert all(p.grad.any() for name, p in network.named_parameters() if not name.startswith("quant_conv"))
    values = []
    for step in (-1e-6, 2e-6):
        with torch.no_grad():
            torch._foreach_add_(list(network.parameters()), direction, alpha=step)
            values.append(loss().item())

    assert (values[1] - values[0]) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_channels_last_memory_gives_the_same_pictures(vae, images):
    expected = vae.decode(vae.encode_moments(images)[:, :3])
    network = AutoencoderKL(SIZES).double()
    network.load_state_dict(vae.state_dict())
    network.to(memory_format=torch.channels_last)

    decoded = network.decode(network.encode_moments(images.to(memory_format=torch.channels_last))[:, :3])

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
