"""Noised latents against their definition in float64, their noise against chance, and what it depends on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noising_oracle import LATENT_SCALE, expected, moments
from scipy import stats
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import abar, noised
from tests.capturable import Capturable

SCHEDULE = abar(), LATENT_SCALE
SEEDS = [0, 1234567890123, -5]
IDS = [0, 7, 2**31 - 1, 2**31 + 5, 2**32 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_latents_targets_and_times_are_the_definitions(seed: int) -> None:
    given, ids = moments(5, 4, 3, 5).double(), torch.tensor(IDS)
    oracle = expected(given, seed, IDS)
    found = noised(given, torch.tensor(seed), ids, *SCHEDULE, torch.float64)
    assert found.t_N.dtype == torch.int64
    assert found.t_N.tolist() == oracle.t.tolist()
    for value, formula in ((found.x_t_NCHW, oracle.x_t), (found.v_NCHW, oracle.target)):
        assert value.dtype == torch.float64
        assert value.is_contiguous(memory_format=torch.channels_last)
        np.testing.assert_allclose(value.numpy(), formula, rtol=1e-12, atol=1e-9)  # some latents are 1e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_arithmetic_is_in_single(dtype: torch.dtype) -> None:
    given, ids = moments(3, 4, 4, 4), [3, 1, 2]
    oracle = expected(given, 9, ids)
    found = noised(given, torch.tensor(9), torch.tensor(ids), *SCHEDULE, dtype)
    assert (found.x_t_NCHW.dtype, found.v_NCHW.dtype) == (dtype, torch.float32)
    tolerance = 2e-6 if dtype == torch.float32 else 6e-4
    np.testing.assert_allclose(found.x_t_NCHW.double().numpy(), oracle.x_t, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.v_NCHW.double().numpy(), oracle.target, rtol=2e-6, atol=2e-6)


def test_a_samples_noise_depends_on_no_batch_and_no_order() -> None:
    given, ids = moments(6, 4, 3, 3).double(), torch.tensor([5, 900, 4, 3_000_000_000, 0, 77])
    together = noised(given, torch.tensor(3), ids, *SCHEDULE, torch.float64)
    for rows in ([0], [4, 2], [5, 1, 3]):
        apart = noised(given[rows], torch.tensor(3), ids[rows], *SCHEDULE, torch.float64)
        for value, whole in zip(apart, together, strict=True):
            assert torch.equal(value, whole[rows])


def normals(seed: int, samples: int, places: int) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Latent noise and noise, (samples, elements), out of what became of latents of nothing else; and the times."""
    given, abar_T = torch.zeros(samples, 8, places, places, dtype=torch.float64), abar()
    x_t, v, t_N = noised(given, torch.tensor(seed), torch.arange(samples), abar_T, 1.0, torch.float64)
    share = abar_T[t_N].view(-1, 1, 1, 1)
    signal, noise = share.sqrt(), (1 - share).sqrt()
    n, eps = signal * x_t - noise * v, noise * x_t + signal * v
    return n.flatten(1).numpy(), eps.flatten(1).numpy(), t_N


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, Tensor]:
    return normals(20, 256, 16)


def test_noise_is_normal(drawn) -> None:
    cuts = stats.norm.ppf(np.arange(1, 64) / 64)
    for values in drawn[:2]:
        counts = np.bincount(np.searchsorted(cuts, values.ravel()), minlength=64)
        assert stats.chisquare(counts).pvalue > 1e-4
        count = values.size
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((values**power).mean() - moment) < 4 * math.sqrt(variance / count)
        assert 4.0 < np.abs(values).max() < 6.8


def test_noise_is_independent_between_kinds_elements_samples_and_seeds(drawn) -> None:
    n, eps, _ = drawn
    other, _, _ = normals(21, 256, 16)
    pairs = {
        "latent's and added": (n, eps),
        "neighbouring elements": (n[:, 1:], n[:, :-1]),
        "neighbouring samples": (n[1:], n[:-1]),
        "seeds": (n, other),
        "squares": (n**2 - 1, eps**2 - 1),
    }
    for name, (some, others) in pairs.items():
        correlation = np.corrcoef(some.ravel(), others.ravel())[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(some.size), name


def test_times_are_uniform() -> None:
    ids = torch.arange(200_000)
    t_N = noised(torch.zeros(200_000, 2, 1, 1), torch.tensor(8), ids, *SCHEDULE, torch.float32).t_N
    assert (t_N.min(), t_N.max()) == (0, 999)
    assert stats.chisquare(torch.bincount(t_N, minlength=1000).numpy()).pvalue > 1e-4


def test_a_moment_that_is_not_finite_stays_so() -> None:
    given = moments(1, 4, 2, 2)
    given[0, 5, 1, 1] = math.nan
    found = noised(given, torch.tensor(0), torch.tensor([0]), *SCHEDULE, torch.float32)
    assert found.x_t_NCHW.isnan().sum() == 1


def test_noising_is_capturable() -> None:
    given, seed, ids = moments(2, 4, 2, 2), torch.tensor(3), torch.tensor([1, 2])
    with Capturable():
        noised(given, seed, ids, *SCHEDULE, torch.float32)


def test_moments_of_16_bits_are_widened_first() -> None:
    given, seed, ids = moments(2, 4, 2, 2).bfloat16(), torch.tensor(3), torch.tensor([1, 2])
    found, expected = (noised(each, seed, ids, *SCHEDULE, torch.float32) for each in (given, given.float()))
    assert found.v_NCHW.dtype == torch.float32
    assert torch.equal(found.v_NCHW, expected.v_NCHW)
    assert torch.equal(found.x_t_NCHW, expected.x_t_NCHW)
