"""The hash against its formula in unsigned arithmetic, and its bits against chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from common.ops.random_bits.reference import normal_pairs, words

SEEDS = [0, 1, -1, 1 << 40, -0x0123456789ABCDEF]


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def formula(index: np.ndarray, seed: int, site: int) -> np.ndarray:
    low, high = (np.array([part], np.uint32) for part in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    number = np.array([(site * 0x9E3779B9 + 1) & 0xFFFFFFFF], np.uint32)
    first = mix(low ^ mix(number))
    second = mix(high + mix(first ^ np.uint32(site)))
    return mix(mix(index ^ first) ^ second)


@pytest.mark.parametrize("site", [0, 1, 77])
@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_the_formula(seed, site):
    index = np.array([0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    found = words(torch.from_numpy(index.astype(np.int64)), torch.tensor(seed), site)
    assert found.dtype == torch.int32
    assert np.array_equal(found.numpy().view(np.uint32), formula(index, seed, site))


def test_seeds_and_indices_broadcast():
    seeds, index = torch.tensor(SEEDS), torch.arange(100)
    together = words(index, seeds[:, None])
    assert torch.equal(together, torch.stack([words(index, seed) for seed in seeds]))


def test_sites_broadcast():
    sites, index = torch.tensor([0, 1, 77, 2**31 - 1]), torch.arange(100)
    together = words(index, torch.tensor(SEEDS[4]), sites[:, None])
    assert torch.equal(together, torch.stack([words(index, torch.tensor(SEEDS[4]), int(site)) for site in sites]))


def test_every_bit_is_set_half_of_the_time_and_in_another_half_for_another_seed():
    index, bits = torch.arange(1 << 16), torch.arange(32)
    some, others = ((words(index, torch.tensor(seed))[:, None] >> bits) & 1 for seed in (3, 4))
    for ones in (some, some ^ others, some[1:] ^ some[:-1]):
        assert (ones.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(1 << 16)


@pytest.mark.parametrize("site", [0, 77])
def test_normal_pairs_are_box_and_mullers_of_two_words(site):
    index = torch.tensor([0, 1, 12345, 2**31 - 1])
    found = normal_pairs(index, torch.tensor(SEEDS[4]), site, torch.float64)
    first, second = (
        (formula((2 * index + which).numpy().astype(np.uint32), SEEDS[4], site) + 0.5) / 2**32 for which in (0, 1)
    )
    radius = np.sqrt(-2 * np.log(first))
    np.testing.assert_allclose(found[0], radius * np.cos(2 * np.pi * second), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], radius * np.sin(2 * np.pi * second), rtol=1e-6, atol=1e-6)
    in_single = normal_pairs(index, torch.tensor(SEEDS[4]), site)
    assert all(torch.allclose(one.double(), other, atol=1e-6) for one, other in zip(in_single, found, strict=True))


def test_normal_pairs_are_finite_at_the_hashs_smallest_and_largest_words(monkeypatch):
    for word in (0, -1):
        monkeypatch.setattr(
            "common.ops.random_bits.reference.words", lambda index, *_, word=word: torch.full_like(index, word)
        )
        pair = normal_pairs(torch.tensor([0]), torch.tensor(0))
        assert all(value.isfinite().all() and value.abs().max() < 6.8 for value in pair)
