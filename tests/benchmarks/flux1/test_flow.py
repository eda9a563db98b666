"""Test latents, packing, times, noise and loss of the rectified flow against their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from benchmarks.flux1.flow import LatentScale, Noised, noised, pack, sample_losses

PUBLISHED = LatentScale(0.1159, 0.3611)
SEED = torch.tensor(5)


def moments(samples: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    mean, logvar = torch.randn(2, samples, 3, 4, 6, generator=generator, dtype=torch.float64)
    return mean.to(dtype), logvar.to(dtype)


def at_times(t: float | None, samples: int = 5, **changes: object) -> Noised:
    mean, logvar = moments(samples)
    ids = torch.arange(samples) + 7
    times = None if t is None else torch.full((samples,), t, dtype=torch.float64)
    given = {"mean_NAHW": mean, "logvar_NAHW": logvar, "seed": SEED, "sample_ids_N": ids, "latents": PUBLISHED}
    return noised(**{**given, "patch": 2, "dtype": torch.float64, "t_N": times, **changes})


def test_a_token_is_a_patch_with_the_channels_first():
    x = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    packed = pack(x, 2)
    assert packed.shape == (2, 6, 12)
    for row, column, channel, i, j in itertools.product(range(2), range(3), range(3), range(2), range(2)):
        found = packed[:, row * 3 + column, channel * 4 + i * 2 + j]
        assert torch.equal(found, x[:, channel, 2 * row + i, 2 * column + j])


def test_input_and_velocity_follow_from_latent_and_noise():
    (z, *_), (eps, *_) = at_times(0.0), at_times(1.0)
    for t in (0.0, 0.25, 0.875, 1.0):
        x_t, v, times = at_times(t)
        torch.testing.assert_close(x_t, (1 - t) * z + t * eps, rtol=0, atol=1e-14)
        torch.testing.assert_close(v, eps - z, rtol=0, atol=1e-14)
        assert times.tolist() == [t] * 5


def test_latents_have_the_mean_and_the_variance_of_the_autoencoder():
    """Without variance, the latent is the shifted and scaled mean; with logvar 2 ln 3, its deviation is 3 scales."""
    mean, _ = moments(5)
    certain = at_times(0.0, logvar_NAHW=torch.full_like(mean, -1000.0)).x_t_NLP
    torch.testing.assert_close(certain, pack(0.3611 * (mean - 0.1159), 2), rtol=0, atol=1e-14)
    ids, zeros = torch.arange(2000), torch.zeros(2000, 3, 4, 6, dtype=torch.float64)
    wide = at_times(0.0, 2000, mean_NAHW=zeros, logvar_NAHW=zeros + 2 * torch.tensor(3.0).log(), sample_ids_N=ids)
    standard = (wide.x_t_NLP / 0.3611 + 0.1159) / 3
    assert stats.kstest(standard.flatten().numpy(), "norm").pvalue > 0.01


def test_noise_is_normal_and_independent_of_the_latent():
    zeros, ids = torch.zeros(2000, 3, 4, 6, dtype=torch.float64), torch.arange(2000)
    given = {"mean_NAHW": zeros, "logvar_NAHW": zeros, "sample_ids_N": ids}
    eps, z = at_times(1.0, 2000, **given).x_t_NLP.flatten(), at_times(0.0, 2000, **given).x_t_NLP.flatten()
    assert stats.kstest(eps.numpy(), "norm").pvalue > 0.01
    assert abs(float(torch.corrcoef(torch.stack([eps, z]))[0, 1])) < 0.01


def test_times_are_uniform():
    zeros, ids = torch.zeros(20_000, 1, 2, 2), torch.arange(20_000)
    t = at_times(None, 20_000, mean_NAHW=zeros, logvar_NAHW=zeros, sample_ids_N=ids).t_N
    assert t.dtype == torch.float32
    assert stats.kstest(t.numpy(), "uniform").pvalue > 0.01


def test_random_numbers_depend_only_on_seed_and_sample():
    mean, logvar = moments(5)
    ids = torch.tensor([3, 1, 2**32 - 1, 0, 9])
    whole = at_times(None, sample_ids_N=ids)
    part = at_times(None, mean_NAHW=mean[2:4], logvar_NAHW=logvar[2:4], sample_ids_N=ids[2:4])
    for of_part, of_whole in zip(part, whole, strict=True):
        assert torch.equal(of_part, of_whole[2:4])
    other = at_times(None, sample_ids_N=ids, seed=SEED + 1)
    assert not (other.t_N == whole.t_N).any()


def test_arithmetic_is_in_fp32_for_bf16_moments():
    mean, logvar = moments(5, torch.bfloat16)
    found = at_times(None, mean_NAHW=mean, logvar_NAHW=logvar, dtype=torch.bfloat16)
    exact = at_times(None, mean_NAHW=mean.double(), logvar_NAHW=logvar.double())
    assert (found.x_t_NLP.dtype, found.v_NLP.dtype, found.t_N.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(found.v_NLP.double(), exact.v_NLP, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_of_a_sample_is_its_mean_squared_error(dtype):
    prediction, target = torch.randn(2, 4, 6, 12, dtype=dtype)
    found = sample_losses(prediction, target)
    wanted = [float(((p - v) ** 2).sum()) / 72 for p, v in zip(prediction, target, strict=True)]
    assert found.dtype == dtype
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
