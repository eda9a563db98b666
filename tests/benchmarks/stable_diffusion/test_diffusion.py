"""Test the schedule, the noising, the loss and the sampler's times against their definitions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import eps_of, noised, sampling_times, velocity_loss, x0_of
from tests.benchmarks.stable_diffusion.small_unet import ABAR


def test_the_schedule_has_known_values():
    assert ABAR.dtype == torch.float64
    assert ABAR.shape == (1000,)
    assert ABAR[0].item() == pytest.approx(1 - 0.00085, abs=1e-15)
    assert ABAR[500].item() == pytest.approx(0.276333, abs=5e-7)
    assert ABAR[999].item() == pytest.approx(0.00466010, abs=5e-9)
    assert ABAR.mean().item() == pytest.approx(0.373377, abs=5e-7)


def test_latent_and_noise_follow_from_velocity_at_every_time():
    random = torch.Generator().manual_seed(0)
    z, eps = (torch.randn(1000, 4, 2, 2, dtype=torch.float64, generator=random) for _ in range(2))
    abar_T111 = ABAR.view(-1, 1, 1, 1)
    signal, noise = abar_T111.sqrt(), (1 - abar_T111).sqrt()
    x_t, v = signal * z + noise * eps, signal * eps - noise * z
    torch.testing.assert_close(x0_of(x_t, v, abar_T111), z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(eps_of(x_t, v, abar_T111), eps, rtol=1e-12, atol=1e-12)


def test_fifty_steps_go_from_time_981_to_time_0():
    t_S, abar_S, previous_S = sampling_times(ABAR, 50)
    assert t_S.tolist() == list(range(981, 0, -20))
    assert torch.equal(abar_S, ABAR[t_S])
    assert torch.equal(previous_S[:-1], ABAR[t_S[1:]])
    assert previous_S[-1] == ABAR[0]


LATENT_SCALE = 0.18215


class Oracle(NamedTuple):
    """Expected values of :func:`noised`, in float64."""

    n: np.ndarray
    eps: np.ndarray
    x_t: np.ndarray
    target: np.ndarray
    t: np.ndarray


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hashed(index: np.ndarray, seed: int, site: int) -> np.ndarray:
    low, high = (np.array([part], np.uint32) for part in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    first = mix(low ^ mix(np.array([(site * 0x9E3779B9 + 1) & 0xFFFFFFFF], np.uint32)))
    second = mix(high + mix(first ^ np.uint32(site)))
    return mix(mix(index.astype(np.uint32) ^ first) ^ second)


def uniform(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32


def expected(moments: Tensor, seed: int, sample_ids: list[int]) -> Oracle:
    values = moments.double().numpy()
    samples, channels = values.shape[0], values.shape[1] // 2
    mean, log_variance = values[:, :channels], values[:, channels:]
    index = np.arange(mean[0].size)
    n, eps, t = [], [], []
    for site in sample_ids:
        radius = np.sqrt(-2 * np.log(uniform(hashed(2 * index, seed, site))))
        angle = 2 * np.pi * uniform(hashed(2 * index + 1, seed, site))
        n.append((radius * np.cos(angle)).reshape(mean.shape[1:]))
        eps.append((radius * np.sin(angle)).reshape(mean.shape[1:]))
        t.append(int(hashed(np.array([2**32 - 1]), seed, site)[0]) * len(ABAR) >> 32)
    n, eps, t = np.stack(n), np.stack(eps), np.array(t)
    z = LATENT_SCALE * (mean + np.exp(0.5 * np.clip(log_variance, -30, 20)) * n)
    share = ABAR.numpy()[t].reshape(samples, 1, 1, 1)
    return Oracle(
        n, eps, np.sqrt(share) * z + np.sqrt(1 - share) * eps, np.sqrt(share) * eps - np.sqrt(1 - share) * z, t
    )


def moments(samples: int, channels: int, height: int, width: int) -> Tensor:
    """Return means with deviation 5, and log-variances from -15 to -5, some beyond the bounds."""
    random = torch.Generator().manual_seed(samples)
    found = torch.randn(samples, 2 * channels, height, width, generator=random) * 5
    found[:, channels:] = found[:, channels:] - 10
    found[0, channels, 0, 0], found[-1, -1, -1, -1] = -100.0, 25.0
    return found


SCHEDULE = ABAR, LATENT_SCALE
SEEDS = [0, 1234567890123, -5]
IDS = [0, 7, 2**31 - 1, 2**31 + 5, 2**32 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_latents_targets_and_times_equal_the_definition(seed):
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
def test_noising_computes_in_fp32(dtype):
    given, ids = moments(3, 4, 4, 4), [3, 1, 2]
    oracle = expected(given, 9, ids)
    found = noised(given, torch.tensor(9), torch.tensor(ids), *SCHEDULE, dtype)
    assert (found.x_t_NCHW.dtype, found.v_NCHW.dtype) == (dtype, torch.float32)
    tolerance = 2e-6 if dtype == torch.float32 else 6e-4
    np.testing.assert_allclose(found.x_t_NCHW.double().numpy(), oracle.x_t, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.v_NCHW.double().numpy(), oracle.target, rtol=2e-6, atol=2e-6)


def test_noise_does_not_depend_on_batch_or_order():
    given, ids = moments(6, 4, 3, 3).double(), torch.tensor([5, 900, 4, 3_000_000_000, 0, 77])
    together = noised(given, torch.tensor(3), ids, *SCHEDULE, torch.float64)
    for rows in ([0], [4, 2], [5, 1, 3]):
        apart = noised(given[rows], torch.tensor(3), ids[rows], *SCHEDULE, torch.float64)
        for value, whole in zip(apart, together, strict=True):
            assert torch.equal(value, whole[rows])


def normals(seed: int, samples: int, size: int) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return latent noise and added noise, (samples, elements), and times, recovered from noised zeros."""
    given = torch.zeros(samples, 8, size, size, dtype=torch.float64)
    x_t, v, t_N = noised(given, torch.tensor(seed), torch.arange(samples), ABAR, 1.0, torch.float64)
    share = ABAR[t_N].view(-1, 1, 1, 1)
    signal, noise = share.sqrt(), (1 - share).sqrt()
    n, eps = signal * x_t - noise * v, noise * x_t + signal * v
    return n.flatten(1).numpy(), eps.flatten(1).numpy(), t_N


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, Tensor]:
    return normals(20, 256, 16)


def test_noise_is_normal(drawn):
    cuts = stats.norm.ppf(np.arange(1, 64) / 64)
    for values in drawn[:2]:
        counts = np.bincount(np.searchsorted(cuts, values.ravel()), minlength=64)
        assert stats.chisquare(counts).pvalue > 1e-4
        count = values.size
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((values**power).mean() - moment) < 4 * math.sqrt(variance / count)
        assert 4.0 < np.abs(values).max() < 6.8


def test_noise_is_independent_between_kinds_elements_samples_and_seeds(drawn):
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


def test_times_are_uniform():
    ids = torch.arange(200_000)
    t_N = noised(torch.zeros(200_000, 2, 1, 1), torch.tensor(8), ids, *SCHEDULE, torch.float32).t_N
    assert (t_N.min(), t_N.max()) == (0, 999)
    assert stats.chisquare(torch.bincount(t_N, minlength=1000).numpy()).pvalue > 1e-4


def test_noising_propagates_nan():
    given = moments(1, 4, 2, 2)
    given[0, 5, 1, 1] = math.nan
    found = noised(given, torch.tensor(0), torch.tensor([0]), *SCHEDULE, torch.float32)
    assert found.x_t_NCHW.isnan().sum() == 1


def test_16_bit_moments_are_converted_to_fp32_first():
    given, seed, ids = moments(2, 4, 2, 2).bfloat16(), torch.tensor(3), torch.tensor([1, 2])
    found, expected = (noised(each, seed, ids, *SCHEDULE, torch.float32) for each in (given, given.float()))
    assert found.v_NCHW.dtype == torch.float32
    assert torch.equal(found.v_NCHW, expected.v_NCHW)
    assert torch.equal(found.x_t_NCHW, expected.x_t_NCHW)


def prediction_and_target(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    prediction, target = (torch.randn(3, 4, 2, 5, generator=random, dtype=torch.float64) for _ in range(2))
    return prediction.to(dtype).requires_grad_(), target.to(torch.promote_types(dtype, torch.float32))


def test_loss_and_gradient_equal_the_definition():
    prediction, target = prediction_and_target()
    loss = velocity_loss(prediction, target)
    samples = [((prediction[i] - target[i]) ** 2).sum().item() / 40 for i in range(3)]
    assert loss.item() == pytest.approx(sum(samples) / 3, rel=1e-14)
    (gradient,) = torch.autograd.grad(loss * 8.0, prediction)
    torch.testing.assert_close(gradient, 8.0 * 2 / 120 * (prediction - target), rtol=1e-13, atol=1e-13)


def test_a_loss_scale_keeps_fp16_gradients_accurate():
    prediction, target = (value.detach() * 2**-13 for value in prediction_and_target(torch.float16))
    prediction.requires_grad_()
    for scale in (1.0, 65536.0):
        loss = velocity_loss(prediction, target)
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss * scale, prediction)
        exact = scale * 2 / 120 * (prediction.detach().double() - target.double())
        error = (gradient.double() - exact).norm() / exact.norm()
        assert error < 1e-3 if scale > 1 else error > 1e-3
