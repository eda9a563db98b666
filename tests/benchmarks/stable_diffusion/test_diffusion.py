"""The schedule against values known from elsewhere, what follows from a prediction, and the sampler's times."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.stable_diffusion import diffusion


def test_the_schedule_has_the_models_values():
    abar_T = diffusion.abar()
    assert abar_T.dtype == torch.float64
    assert abar_T.shape == (1000,)
    assert abar_T[0].item() == pytest.approx(1 - 0.00085, abs=1e-15)
    assert abar_T[500].item() == pytest.approx(0.276333, abs=5e-7)
    assert abar_T[999].item() == pytest.approx(0.00466010, abs=5e-9)
    assert abar_T.mean().item() == pytest.approx(0.373377, abs=5e-7)


def test_the_schedule_is_the_product_of_what_the_betas_leave():
    left, found = 1.0, diffusion.abar(7, 0.01, 0.2)
    for t in range(7):
        left *= 1 - (math.sqrt(0.01) + (math.sqrt(0.2) - math.sqrt(0.01)) * t / 6) ** 2
        assert found[t].item() == pytest.approx(left, rel=1e-14)


@pytest.mark.parametrize("given", [(0, 0.1, 0.2), (10, 0.0, 0.2), (10, 0.3, 0.2), (10, 0.3, 1.0)])
def test_a_schedule_that_means_nothing_is_refused(given):
    with pytest.raises(ValueError, match="0 < first <= last < 1"):
        diffusion.abar(*given)


def test_latent_and_noise_come_back_from_what_was_made_of_them_at_every_time():
    random = torch.Generator().manual_seed(0)
    z, eps = (torch.randn(1000, 4, 2, 2, dtype=torch.float64, generator=random) for _ in range(2))
    abar = diffusion.abar().view(-1, 1, 1, 1)
    signal, noise = abar.sqrt(), (1 - abar).sqrt()
    x_t, v = signal * z + noise * eps, signal * eps - noise * z
    torch.testing.assert_close(diffusion.x0_of(x_t, v, abar), z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(diffusion.eps_of(x_t, v, abar), eps, rtol=1e-12, atol=1e-12)


def test_fifty_steps_go_from_981_down_to_1_and_lead_to_time_0():
    abar_T = diffusion.abar()
    t_S, abar_S, previous_S = diffusion.sampling_times(abar_T, 50)
    assert t_S.tolist() == list(range(981, 0, -20))
    assert torch.equal(abar_S, abar_T[t_S])
    assert torch.equal(previous_S[:-1], abar_T[t_S[1:]])
    assert previous_S[-1] == abar_T[0]


@pytest.mark.parametrize("steps", [0, 3, 1000])
def test_steps_that_do_not_fit_the_schedule_are_refused(steps):
    with pytest.raises(ValueError, match="a divisor of the 1000 times"):
        diffusion.sampling_times(diffusion.abar(), steps)
