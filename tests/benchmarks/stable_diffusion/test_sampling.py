"""The sampler: its closed form, guidance, one captured step, and noise that depends on the prompt alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.stable_diffusion.diffusion import abar, sampling_times
from benchmarks.stable_diffusion.sampler import Sampler, initial_noise
from common.contract.evaluation import Weights
from tests.benchmarks.stable_diffusion.small_unet import SMALL, small_unet
from tests.capturable import Capturable

ABAR = abar()
SHAPE = (4, 6, 5)
TOKENS, KEYS = 3, 2


def sampler_of(velocity, steps=50, guidance=8.0, batch=2, dtype=torch.float64, model=None):
    keys_values = torch.zeros(batch, TOKENS, KEYS, dtype=dtype)
    times = sampling_times(ABAR, steps)
    return Sampler(model or nn.Identity(), velocity, times, guidance, SHAPE, keys_values, capture=True, dtype=dtype)


def perfect(z, seen):
    """Knows ``z`` whatever it sees; what it sees is kept."""

    def velocity(x, t, keys_values):
        seen.append((x.clone(), t.clone()))
        share = ABAR[t].view(-1, 1, 1, 1)
        eps = (x - share.sqrt() * z) / (1 - share).sqrt()
        return share.sqrt() * eps - (1 - share).sqrt() * z

    return velocity


def test_a_perfect_prediction_ends_at_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    z, noise = (torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    seen = []
    found = sampler_of(perfect(torch.cat([z, z]), seen)).sample(noise, torch.zeros(2, TOKENS, KEYS))
    e = (noise - ABAR[981].sqrt() * z) / (1 - ABAR[981]).sqrt()
    torch.testing.assert_close(found, ABAR[0].sqrt() * z + (1 - ABAR[0]).sqrt() * e, rtol=0, atol=1e-11)
    torch.testing.assert_close(found, 0.999575 * z + 0.029155 * e, rtol=0, atol=3e-6)  # worked out by hand
    assert [t.tolist() for _, t in seen] == [[time] * 4 for time in range(981, 0, -20)]
    for x, t in seen:  # noise stays the same all the way down
        share = ABAR[t[0]]
        torch.testing.assert_close(x[2:], share.sqrt() * z + (1 - share).sqrt() * e, rtol=0, atol=1e-11)
        torch.testing.assert_close(x[:2], x[2:], rtol=0, atol=0)


def test_guidance_extrapolates_from_no_caption_to_the_caption():
    """Against the step written out in float64 with the two halves called apart."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    without, captions = (
        torch.rand(1, TOKENS, KEYS, dtype=torch.float64),
        torch.rand(2, TOKENS, KEYS, dtype=torch.float64),
    )

    def velocity(x, t, keys_values):
        return torch.tanh(x * keys_values.mean((1, 2)).view(-1, 1, 1, 1) + t.view(-1, 1, 1, 1) / 1000)

    sampler = sampler_of(velocity, steps=5, guidance=3.0)
    sampler.without_caption(without)
    found = sampler.sample(noise, captions)
    x, times = noise, [801, 601, 401, 201, 1]
    for t, lower in zip(times, [601, 401, 201, 1, 0], strict=True):
        now = torch.full((2,), t)
        v_u, v_c = velocity(x, now, without.expand(2, -1, -1)), velocity(x, now, captions)
        v = -2 * v_u + 3 * v_c
        share, lower_share = float(ABAR[t]), float(ABAR[lower])
        x0 = share**0.5 * x - (1 - share) ** 0.5 * v
        eps = share**0.5 * v + (1 - share) ** 0.5 * x
        x = lower_share**0.5 * x0 + (1 - lower_share) ** 0.5 * eps
    torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-12)


def test_a_second_batch_starts_anew():
    z = torch.ones(4, *SHAPE, dtype=torch.float64)
    sampler = sampler_of(perfect(z, []), steps=4)
    noise, keys_values = torch.full((2, *SHAPE), 0.5, dtype=torch.float64), torch.zeros(2, TOKENS, KEYS)
    sampler.warm_up()
    first = sampler.sample(noise, keys_values).clone()
    assert torch.equal(sampler.sample(noise, keys_values), first)
    assert not torch.equal(sampler.sample(-noise, keys_values), first)


def test_the_step_of_the_real_network_can_be_recorded():
    model = small_unet(torch.float32)
    context = torch.randn(2, SMALL.context_length, SMALL.context_width)
    shape = (SMALL.latent_channels, SMALL.latent_size, SMALL.latent_size)
    with torch.no_grad():
        keys_values = model.cross_keys_values(context)
        sampler = Sampler(
            model, lambda x, t, kv: model(x, t, keys_values=kv), sampling_times(ABAR, 4), 8.0, shape, keys_values, True
        )
        sampler.warm_up()
        sampler.without_caption(keys_values[:1])
        noise = torch.randn(2, *shape)
        with Capturable():
            recorded = sampler.sample(noise, keys_values).clone()
        assert recorded.is_contiguous(memory_format=torch.channels_last)
        x = noise  # the same by whole captions, one latent at a time
        for t, lower in zip([751, 501, 251, 1], [501, 251, 1, 0], strict=True):
            times = torch.full((2,), t)
            v_u, v_c = model(x, times, context[:1].expand(2, -1, -1)), model(x, times, context)
            v, share, lower_share = v_u + 8 * (v_c - v_u), float(ABAR[t]), float(ABAR[lower])
            x0 = share**0.5 * x - (1 - share) ** 0.5 * v
            eps = share**0.5 * v + (1 - share) ** 0.5 * x
            x = lower_share**0.5 * x0 + (1 - lower_share) ** 0.5 * eps
    torch.testing.assert_close(recorded, x, rtol=1e-3, atol=1e-3)


def test_weights_of_an_evaluation_are_used_and_put_back():
    model = nn.Conv2d(4, 4, 1, bias=False)
    nn.init.zeros_(model.weight)
    sampler = sampler_of(lambda x, t, kv: model(x), steps=2, dtype=torch.float32, model=model)
    noise, keys_values = torch.ones(2, *SHAPE), torch.zeros(2, TOKENS, KEYS)
    with sampler.evaluating(Weights({"weight": torch.ones(4, 4, 1, 1)})):
        replaced = sampler.sample(noise, keys_values).clone()
    with sampler.evaluating(Weights({"weight": model.weight})):
        own = sampler.sample(noise, keys_values)
    assert not torch.equal(replaced, own)
    assert model.weight.abs().max() == 0


def test_latents_of_half_precision_are_refused():
    with pytest.raises(ValueError, match="fp32 or fp64"):
        sampler_of(lambda x, t, kv: x, dtype=torch.float16)


def test_noise_belongs_to_the_prompt_and_not_to_its_batch():
    seed = torch.tensor(123)
    whole = initial_noise(seed, torch.arange(6), SHAPE, torch.float32)
    parts = [initial_noise(seed, torch.tensor(ids), SHAPE, torch.float32) for ids in ([4, 0], [1], [5, 3, 2])]
    assert torch.equal(torch.cat(parts), whole[[4, 0, 1, 5, 3, 2]])
    assert not torch.equal(initial_noise(seed + 1, torch.arange(6), SHAPE, torch.float32), whole)
    assert whole.is_contiguous(memory_format=torch.channels_last)


def test_noise_is_normal_and_independent_over_prompts():
    noise = initial_noise(torch.tensor(7), torch.arange(40), (4, 16, 16), torch.float64).flatten(1)
    number = noise.numel()
    assert abs(noise.mean()) < 5 * number**-0.5
    assert abs(noise.var() - 1) < 5 * (2 / number) ** 0.5
    assert abs((noise**4).mean() - 3) < 5 * (96 / number) ** 0.5
    between = noise @ noise.T / noise.shape[1]
    assert (between - torch.diag(between.diag())).abs().max() < 5.5 * noise.shape[1] ** -0.5
