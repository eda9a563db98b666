"""Test the small frozen networks that are fitted to generated pictures."""

import dataclasses
import gzip
import random

import pytest
import torch
import torch.nn.functional as F

from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.frozen.sizes import SMALL_INCEPTION, SMALL_TEXT, SMALL_VISION, VaeSizes
from benchmarks.stable_diffusion.synthetic_networks import fit_clip, fit_vae, random_inception, small_merges
from common.nn.frozen import frozen_names

VAE = VaeSizes(channels=8, multipliers=(1, 2), blocks=1, groups=2)
STEPS = 40
COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.1, 0.2, 0.9), "yellow": (0.9, 0.8, 0.1)}


def drawn(count, size, seed):
    """Return pictures (N, 3, size, size) in [0, 1] of one shape on a background of another colour, and N captions."""
    generator = random.Random(seed)
    line = (torch.arange(size) + 0.5) / size
    y, x = line[:, None], line[None, :]
    pictures, captions = [], []
    for _ in range(count):
        inner, outer = generator.sample(list(COLOURS), 2)
        shape = generator.choice(("circle", "square", "triangle"))
        u, v, radius = (generator.uniform(low, high) for low, high in ((0.35, 0.65), (0.35, 0.65), (0.2, 0.3)))
        masks = {
            "circle": (x - u) ** 2 + (y - v) ** 2 < radius**2,
            "square": ((x - u).abs() < radius * 0.9) & ((y - v).abs() < radius * 0.9),
            "triangle": (y - v < radius) & ((x - u).abs() * 2 < y - v + radius),
        }
        front, back = (torch.tensor(COLOURS[name])[:, None, None] for name in (inner, outer))
        pictures.append(torch.where(masks[shape], front, back))
        captions.append(f"a {inner} {shape} on a {outer} background")
    return torch.stack(pictures), captions


@pytest.fixture(scope="module")
def pictures():
    return drawn(64, 16, seed=0)[0]


@pytest.fixture(scope="module")
def vae(pictures):
    return fit_vae(pictures, VAE, STEPS, seed=0)


def explained(found, expected):
    """Return the explained fraction of the variance."""
    return 1 - ((found - expected).square().mean() / expected.var()).item()


def test_a_fitted_autoencoder_reconstructs_other_pictures(vae):
    others = drawn(32, 16, seed=1)[0]

    mean, log_variance = vae.encode_moments(others).chunk(2, dim=1)
    noisy = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))

    assert explained(vae.decode(mean), others) > 0.75
    assert explained(vae.decode(noisy), others) > 0.7
    assert explained(vae.decode(mean.flip(0)), others) < 0.3
    assert frozen_names(vae) == set(vae.state_dict())
    assert not any(parameter.requires_grad for parameter in vae.parameters())


def test_scaled_latents_have_mean_0_and_deviation_1(vae, pictures):
    latents = VAE.scale * vae.encode_moments(pictures)[:, :4]
    deviation, mean = torch.std_mean(latents, dim=(0, 2, 3))

    torch.testing.assert_close(mean, torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(deviation, torch.ones(4), atol=1e-4, rtol=0)


def test_the_scale_of_latents_does_not_change_pictures(pictures):
    network, other = (fit_vae(pictures, dataclasses.replace(VAE, scale=scale), 4, seed=0) for scale in (0.25, 1.0))
    moments, others = network.encode_moments(pictures), other.encode_moments(pictures)

    torch.testing.assert_close(0.25 * moments[:, :4], others[:, :4], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(0.25 * (0.5 * moments[:, 4:]).exp(), (0.5 * others[:, 4:]).exp(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network.decode(moments[:, :4]), other.decode(others[:, :4]), atol=1e-4, rtol=1e-4)


def test_an_autoencoder_can_be_fitted_to_other_targets(pictures):
    network = fit_vae(pictures, VAE, STEPS, seed=0, targets_N3HW=2 * pictures - 1)

    assert explained((network.decode(network.encode_moments(pictures)[:, :4]) + 1) / 2, pictures) > 0.75


def test_networks_depend_on_the_seed_and_leave_the_random_state(pictures):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    networks = [fit_vae(pictures, VAE, 2, seed) for seed in (1, 1, 2)]

    assert torch.equal(torch.rand(3), expected)
    first, again, other = (network.state_dict() for network in networks)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.conv_in.weight"], other["encoder.conv_in.weight"])


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """Return normalised pictures, captions, and a tokenizer."""
    images, captions = drawn(500, 32, seed=2)
    path = tmp_path_factory.mktemp("merges") / "bpe.txt.gz"
    path.write_bytes(small_merges(captions, 32))
    return (images - 0.5) / 0.27, captions, ClipTokenizer(path, SMALL_TEXT.vocabulary, SMALL_TEXT.context)


def test_fitted_towers_distinguish_captions(captioned):
    pixels, captions, tokenizer = captioned
    text, vision = fit_clip(pixels, captions, tokenizer, SMALL_TEXT, SMALL_VISION, seed=0)
    images, own = drawn(150, 32, seed=3)
    shuffled = [*own[7:], *own[:7]]

    embedded = F.normalize(vision.project((images - 0.5) / 0.27))
    scores = [
        (embedded * F.normalize(text.project(tokenizer(texts)))).sum(1).mean().item() for texts in (own, shuffled)
    ]
    noise = F.normalize(vision.project(torch.randn(images.shape, generator=torch.Generator().manual_seed(0))))

    assert scores[0] > 0.8
    assert abs(scores[1]) < 0.15
    assert (noise * F.normalize(text.project(tokenizer(own)))).sum(1).mean() < 0.3
    assert frozen_names(vision) == set(vision.state_dict())


def test_captions_without_correlation_are_an_error(captioned):
    pixels, captions, tokenizer = captioned
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))

    with pytest.raises(ValueError, match="captions and pictures are not correlated"):
        fit_clip(noise, captions, tokenizer, SMALL_TEXT, SMALL_VISION, seed=0)


def test_a_random_inception_distinguishes_sets_of_pictures():
    network, again = (random_inception(SMALL_INCEPTION, seed=3) for _ in range(2))
    images = drawn(16, 32, seed=4)[0]
    means = [network.features(images[:8]).mean(0), network.features(images[8:]).mean(0)]

    assert torch.equal(network.features(images), again.features(images))
    deviation = network.features(images).std(0)
    assert (deviation > 0).float().mean() > 0.5
    noise = network.features(torch.rand(images.shape, generator=torch.Generator().manual_seed(0))).mean(0)
    assert (means[0] - noise).norm() > 2 * (means[0] - means[1]).norm()


def test_merges_are_the_most_frequent_pairs():
    """The pair (a, b</w>) occurs three times, (a, b) twice, and then (ab, c</w>) twice."""
    content = small_merges(["ab ab ab", "ABC abc", "zz"], 4)

    assert gzip.decompress(content).decode() == "#version: 0.2\na b</w>\na b\nab c</w>\nz z</w>\n"


def test_captions_with_too_few_pairs_are_an_error():
    with pytest.raises(ValueError, match="have 2 pairs to merge, fewer than the required 3"):
        small_merges(["abc"], 3)
