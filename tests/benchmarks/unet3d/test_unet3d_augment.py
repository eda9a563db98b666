"""Test the reference's crops against numpy's slices, and random values against their distributions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks.unet3d.crop import CropDraws, Slab, VolumeCrop
from benchmarks.unet3d.data import draw
from benchmarks.unet3d.ops.augment import augment_reference, noise_of, parameters
from tests.benchmarks.unet3d.small_volumes import PERIOD, facts, numbered

SHAPES = [(9, 14, 13), (8, 12, 10), (20, 15, 11)]
SIZE = (8, 12, 10)
WHOLE = Slab(SIZE, 0, 8)
ALL_FLIPS = list(product((False, True), repeat=3))


def flat_volumes() -> tuple[list[np.ndarray], list[int], torch.Tensor, torch.Tensor]:
    """Return volumes of SHAPES, their offsets, and flat buffers of all images and labels."""
    pairs = [numbered(shape, number) for number, shape in enumerate(SHAPES)]
    offsets = [0, *np.cumsum([image.size for image, _ in pairs])[:-1].tolist()]
    images, labels = (np.concatenate([pair[part].ravel() for pair in pairs]) for part in (0, 1))
    return [image for image, _ in pairs], offsets, torch.from_numpy(images), torch.from_numpy(labels)


def draws_of(flips: tuple[bool, ...] = (False, False, False), scale: float = 1.0, deviation: float = 0.0) -> CropDraws:
    return CropDraws(flips, scale, deviation, 7)


@pytest.mark.parametrize("flips", ALL_FLIPS)
def test_crops_and_labels_equal_numpys_slices(flips):
    volumes, offsets, images, labels = flat_volumes()
    origins = [(1, 2, 3), (0, 0, 0), (12, 3, 1)]
    crops = [VolumeCrop(*position, draws_of(flips)) for position in zip(offsets, SHAPES, origins, strict=True)]
    image, label = augment_reference(images, labels, **parameters(crops, WHOLE), slab=WHOLE, dtype=torch.float32)
    assert image.shape == (3, 1, *SIZE)
    assert label.dtype == torch.uint8
    for number, (volume, origin) in enumerate(zip(volumes, origins, strict=True)):
        cut = volume[tuple(slice(start, start + size) for start, size in zip(origin, SIZE, strict=True))]
        expected = np.flip(cut, [axis for axis in range(3) if flips[axis]])
        assert np.array_equal(image[number, 0].numpy(), expected)
        assert np.array_equal(label[number].numpy(), (expected - 10_000 * number) % PERIOD)


def test_images_are_channels_last():
    _, _, images, labels = flat_volumes()
    given = parameters([VolumeCrop(0, SHAPES[0], (0, 0, 0), draws_of())], WHOLE)
    image, _ = augment_reference(images, labels, **given, slab=WHOLE, dtype=torch.bfloat16)
    empty = torch.empty(1, 1, *SIZE, memory_format=torch.channels_last_3d)
    assert image.stride() == empty.stride()
    assert image.dtype == torch.bfloat16


@pytest.mark.parametrize("flips", ALL_FLIPS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_slabs_equal_slices_of_the_whole_with_noise(flips, ranks):
    _, offsets, images, labels = flat_volumes()
    crops = [VolumeCrop(offsets[2], SHAPES[2], (5, 1, 0), draws_of(flips, 0.8, 0.1))]
    image, label = augment_reference(images, labels, **parameters(crops, WHOLE), slab=WHOLE, dtype=torch.float32)
    slabs = [Slab(SIZE, rank * 8 // ranks, 8 // ranks) for rank in range(ranks)]
    parts = [augment_reference(images, labels, **parameters(crops, s), slab=s, dtype=torch.float32) for s in slabs]
    # On a CPU, the rounding of logarithm and cosine may depend on the position in the tensor, by 2 ulp.
    torch.testing.assert_close(torch.cat([part for part, _ in parts], 2), image, rtol=2.0**-22, atol=1e-6)
    assert torch.equal(torch.cat([part for _, part in parts], 1), label)


def test_brightness_multiplies_each_sample_by_its_own_factor():
    _, _, images, labels = flat_volumes()
    crops = [VolumeCrop(0, SHAPES[0], (0, 0, 0), draws_of(scale=scale)) for scale in (1.0, 0.5, 2.0)]
    image, _ = augment_reference(images, labels, **parameters(crops, WHOLE), slab=WHOLE, dtype=torch.float32)
    assert torch.equal(image[1], image[0] * 0.5)
    assert torch.equal(image[2], image[0] * 2)


def test_noise_has_its_deviation():
    flat, labels = torch.full((8 * 12 * 10,), 3.0), torch.zeros(8 * 12 * 10, dtype=torch.uint8)
    deviations = (0.0, 0.05, 0.1)
    crops = [VolumeCrop(0, SIZE, (0, 0, 0), CropDraws((False,) * 3, 1.0, each, 5)) for each in deviations]
    image, _ = augment_reference(flat, labels, **parameters(crops, WHOLE), slab=WHOLE, dtype=torch.float32)
    assert torch.equal(image[0], torch.full_like(image[0], 3.0))
    assert abs(image[1].std().item() / 0.05 - 1) < 5 / math.sqrt(2 * 960)
    assert torch.allclose((image[2] - 3) / 2, image[1] - 3, atol=1e-6)  # the same noise


def test_addresses_exceed_32_bits():
    offset, shape = 5_000_000_000, (400, 500, 600)
    crop = VolumeCrop(offset, shape, (10, 20, 30), draws_of((True, False, True)))
    start, *steps = parameters([crop], WHOLE)["addresses"][0].tolist()[:4]
    assert start == offset + (10 + 7) * 500 * 600 + 20 * 600 + 30 + 9
    assert steps == [-500 * 600, 600, -1]


def normal_quantiles(values: torch.Tensor) -> torch.Tensor:
    """Return the standard normal distribution function at sorted ``values``."""
    return 0.5 * (1 + torch.erf(values.double().sort().values / math.sqrt(2)))


def test_noise_is_standard_normal():
    count = 200_000
    noise = noise_of(torch.arange(count), torch.tensor(12345))
    distance = (normal_quantiles(noise) - (torch.arange(count) + 0.5) / count).abs().max().item()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov and Smirnov, one in a thousand
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize("distance", [1, 2, 10, 120])
def test_noise_of_neighbours_is_independent(distance):
    count = 200_000
    noise = noise_of(torch.arange(count), torch.tensor(-7)).double()
    assert abs((noise[distance:] * noise[:-distance]).mean().item()) < 4 / math.sqrt(count)
    assert abs((noise[distance:].square() * noise[:-distance].square()).mean().item() - 1) < 4 * 3 / math.sqrt(count)


def test_noise_of_different_seeds_is_independent():
    index = torch.arange(100_000)
    one, other = noise_of(index, torch.tensor([[3], [4]]))
    assert abs((one.double() * other.double()).mean().item()) < 4 / math.sqrt(100_000)


def drawn(variant: str, count: int = 20_000) -> list[CropDraws]:
    generator, rules = np.random.default_rng(11), facts()
    return [draw(generator, rules, variant) for _ in range(count)]


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


def test_probabilities_equal_the_rules():
    draws = drawn("reference")
    bound = 5 / (2 * math.sqrt(len(draws)))
    for axis in range(3):
        assert abs(share([each.flips[axis] for each in draws]) - 1 / 3) < bound
    assert abs(share([all(each.flips) for each in draws]) - 1 / 27) < bound
    assert abs(share([each.scale != 1 for each in draws]) - 0.1) < bound
    assert abs(share([each.deviation != 0 for each in draws]) - 0.1) < bound
    assert abs(share([each.deviation != 0 and each.scale != 1 for each in draws]) - 0.01) < bound
    assert len({each.noise_seed for each in draws}) == len(draws)


@pytest.mark.parametrize(("variant", "low", "high"), [("nvidia", 0.7, 1.3), ("reference", 1.7, 2.3)])
def test_range_of_the_brightness(variant, low, high):
    scales = [each.scale for each in drawn(variant) if each.scale != 1]
    assert low <= min(scales) < low + 0.01
    assert high - 0.01 < max(scales) <= high
    assert abs(np.mean(scales) - (low + high) / 2) < 5 * 0.6 / math.sqrt(12 * len(scales))


def test_range_of_the_references_noise():
    deviations = [each.deviation for each in drawn("reference") if each.deviation]
    assert min(deviations) < 0.001
    assert 0.099 < max(deviations) < 0.1
    assert abs(np.mean(deviations) - 0.05) < 5 * 0.1 / math.sqrt(12 * len(deviations))


def test_nvidias_noise_has_a_fixed_deviation():
    assert {each.deviation for each in drawn("nvidia")} == {0.0, 0.1}
