"""Small frozen networks that are fitted to generated pictures."""

from __future__ import annotations

import dataclasses
import gzip

import pytest
import torch
import torch.nn.functional as F

from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.frozen.sizes import SMALL_INCEPTION, SMALL_TEXT, SMALL_VISION, VaeSizes
from benchmarks.stable_diffusion.synthetic_networks import fit_clip, fit_vae, random_inception, small_merges
from common.nn.frozen import frozen_names
from tests.benchmarks.stable_diffusion.drawn_shapes import drawn

VAE = VaeSizes(channels=8, multipliers=(1, 2), blocks=1, groups=2)
STEPS = 40


@pytest.fixture(scope="module")
def pictures():
    return drawn(64, 16, seed=0)[0]


@pytest.fixture(scope="module")
def vae(pictures):
    return fit_vae(pictures, VAE, STEPS, seed=0)


def explained(found, expected):
    """Share of the variance that is there."""
    return 1 - ((found - expected).square().mean() / expected.var()).item()


def test_a_fitted_autoencoder_gives_other_pictures_back(vae):
    others = drawn(32, 16, seed=1)[0]

    mean, log_variance = vae.encode_moments(others).chunk(2, dim=1)
    noisy = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))

    assert explained(vae.decode(mean), others) > 0.75
    assert explained(vae.decode(noisy), others) > 0.7
    assert explained(vae.decode(mean.flip(0)), others) < 0.3
    assert frozen_names(vae) == set(vae.state_dict())
    assert not any(parameter.requires_grad for parameter in vae.parameters())


def test_its_scaled_latents_have_mean_0_and_deviation_1(vae, pictures):
    latents = VAE.scale * vae.encode_moments(pictures)[:, :4]
    deviation, mean = torch.std_mean(latents, dim=(0, 2, 3))

    torch.testing.assert_close(mean, torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(deviation, torch.ones(4), atol=1e-4, rtol=0)


def test_the_scale_of_latents_changes_nothing_else(pictures):
    network, other = (fit_vae(pictures, dataclasses.replace(VAE, scale=scale), 4, seed=0) for scale in (0.25, 1.0))
    moments, others = network.encode_moments(pictures), other.encode_moments(pictures)

    torch.testing.assert_close(0.25 * moments[:, :4], others[:, :4], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(0.25 * (0.5 * moments[:, 4:]).exp(), (0.5 * others[:, 4:]).exp(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network.decode(moments[:, :4]), other.decode(others[:, :4]), atol=1e-4, rtol=1e-4)


def test_it_can_learn_to_give_other_targets(pictures):
    network = fit_vae(pictures, VAE, STEPS, seed=0, targets_N3HW=2 * pictures - 1)

    assert explained((network.decode(network.encode_moments(pictures)[:, :4]) + 1) / 2, pictures) > 0.75


def test_a_seed_gives_one_network_and_moves_no_random_state(pictures):
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
    """Pictures as CLIP's tower gets them, captions, and a tokenizer."""
    images, captions = drawn(500, 32, seed=2)
    path = tmp_path_factory.mktemp("merges") / "bpe.txt.gz"
    path.write_bytes(small_merges(captions, 32))
    return (images - 0.5) / 0.27, captions, ClipTokenizer(path, SMALL_TEXT.vocabulary)


def test_fitted_towers_tell_a_caption_from_anothers(captioned):
    pixels, captions, tokenizer = captioned
    text, vision = fit_clip(pixels, captions, tokenizer, SMALL_TEXT, SMALL_VISION, seed=0)
    images, own = drawn(150, 32, seed=3)
    shuffled = [own[(place + 7) % len(own)] for place in range(len(own))]

    embedded = F.normalize(vision.project((images - 0.5) / 0.27))
    scores = [
        (embedded * F.normalize(text.project(tokenizer(texts)))).sum(1).mean().item() for texts in (own, shuffled)
    ]
    noise = F.normalize(vision.project(torch.randn(images.shape, generator=torch.Generator().manual_seed(0))))

    assert scores[0] > 0.8
    assert abs(scores[1]) < 0.15
    assert (noise * F.normalize(text.project(tokenizer(own)))).sum(1).mean() < 0.3
    assert frozen_names(vision) == set(vision.state_dict())


def test_captions_that_say_nothing_are_an_error(captioned):
    pixels, captions, tokenizer = captioned
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))

    with pytest.raises(ValueError, match="no caption can be told"):
        fit_clip(noise, captions, tokenizer, SMALL_TEXT, SMALL_VISION, seed=0)
    other = dataclasses.replace(SMALL_VISION, embedding=16)
    with pytest.raises(ValueError, match="embeddings of 32 and 16"):
        fit_clip(pixels, captions, tokenizer, SMALL_TEXT, other, seed=0)


def test_a_random_inception_tells_sets_apart():
    network, again = (random_inception(SMALL_INCEPTION, seed=3) for _ in range(2))
    images = drawn(16, 32, seed=4)[0]
    means = [network.features(images[:8]).mean(0), network.features(images[8:]).mean(0)]

    assert torch.equal(network.features(images), again.features(images))
    deviation = network.features(images).std(0)
    assert (deviation > 0).float().mean() > 0.5
    noise = network.features(torch.rand(images.shape, generator=torch.Generator().manual_seed(0))).mean(0)
    assert (means[0] - noise).norm() > 2 * (means[0] - means[1]).norm()


def test_merges_are_the_most_frequent_pairs():
    """Thrice a with a b that ends a word, twice a with another, and then what that makes with the c behind it."""
    content = small_merges(["ab ab ab", "ABC abc", "zz"], 4)

    assert gzip.decompress(content).decode() == "#version: 0.2\na b</w>\na b\nab c</w>\nz z</w>\n"


def test_captions_of_too_few_pairs_are_an_error():
    with pytest.raises(ValueError, match="have 2 pairs to merge, and 3 are asked for"):
        small_merges(["abc"], 3)
