"""Test the sampler's closed form, guidance, noise and captured step, and the generation of pictures in batches."""

import pytest
import torch
from torch import nn

from benchmarks.stable_diffusion.diffusion import sampling_times
from benchmarks.stable_diffusion.generation import STAGES, GenerationSettings, PictureGenerator, Sampler, initial_noise
from benchmarks.stable_diffusion.scoring_networks import random_networks
from common.contract.evaluation import Weights
from common.evaluation.stage_times import StageTimes
from tests.benchmarks.stable_diffusion.small_evaluation import ddim, small_config, small_model
from tests.benchmarks.stable_diffusion.small_unet import ABAR, SMALL, small_unet
from tests.capturable import Capturable

CPU = torch.device("cpu")
TOKENS = torch.tensor([[528, first, 529, 0, 0, 0, 0, 0, 0] for first in (5, 9, 70, 3, 11)])


@pytest.fixture(scope="module")
def made():
    """Return a U-Net and frozen networks in fp64, in which no parameter is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        empty = TOKENS[:1].clone()
        empty[0, 1:3] = torch.tensor([529, 0])
        return small_model(), random_networks(lambda texts: empty, small_config(), CPU, torch.float64)


def pictures(made, batch, decode_batch, rows):
    """Return the pictures of the captions ``rows``, after a warm-up like that of an evaluation."""
    model, networks = made
    settings = GenerationSettings(sampling_times(ABAR, 4), 3.0, batch, decode_batch)
    generator = PictureGenerator(model, networks, settings, 5, CPU, capture=True, stages=StageTimes(STAGES))
    prompts = torch.tensor(rows)
    tokens = TOKENS[prompts]
    with torch.no_grad():
        generator.warm_up()
    with generator.sampler.evaluating(Weights(dict(model.named_parameters()))):
        generator.begin()
        return generator.pictures(prompts, tokens).clone()


def test_pictures_do_not_depend_on_batch_sizes(made):
    alone = torch.cat([pictures(made, 1, 1, [row]) for row in range(5)])
    assert alone.shape == (5, 3, 8, 8)
    assert alone.min() >= 0
    assert alone.max() <= 1
    assert (alone[1:] - alone[0]).abs().amax((1, 2, 3)).min() > 1e-3
    for decode_batch in (1, 2, 5, 8):
        torch.testing.assert_close(pictures(made, 5, decode_batch, list(range(5))), alone, rtol=1e-9, atol=1e-9)


SHAPE = (4, 6, 5)
KEYS_SHAPE = 3, 2


def sampler_of(velocity, steps=50, guidance=8.0, batch=2, dtype=torch.float64, model=None):
    keys_values = torch.zeros(batch, *KEYS_SHAPE, dtype=dtype)
    times = sampling_times(ABAR, steps)
    return Sampler(model or nn.Identity(), velocity, times, guidance, SHAPE, keys_values, capture=True, dtype=dtype)


def exact_velocity(z, seen):
    """Return a function that predicts the velocity of ``z`` exactly, and appends its inputs to ``seen``."""

    def velocity(x, t, keys_values):
        seen.append((x.clone(), t.clone()))
        share = ABAR[t].view(-1, 1, 1, 1)
        eps = (x - share.sqrt() * z) / (1 - share).sqrt()
        return share.sqrt() * eps - (1 - share).sqrt() * z

    return velocity


def test_exact_predictions_give_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    z, noise = (torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    seen = []
    found = sampler_of(exact_velocity(torch.cat([z, z]), seen)).sample(noise, torch.zeros(2, *KEYS_SHAPE))
    e = (noise - ABAR[981].sqrt() * z) / (1 - ABAR[981]).sqrt()
    torch.testing.assert_close(found, ABAR[0].sqrt() * z + (1 - ABAR[0]).sqrt() * e, rtol=0, atol=1e-11)
    torch.testing.assert_close(found, 0.999575 * z + 0.029155 * e, rtol=0, atol=3e-6)  # from values of the schedule
    assert [t.tolist() for _, t in seen] == [[time] * 4 for time in range(981, 0, -20)]
    for x, t in seen:  # the noise is the same at all times
        share = ABAR[t[0]]
        torch.testing.assert_close(x[2:], share.sqrt() * z + (1 - share).sqrt() * e, rtol=0, atol=1e-11)
        torch.testing.assert_close(x[:2], x[2:], rtol=0, atol=0)


def test_guidance_equals_the_formula():
    """The batched steps equal DDIM's formula with separate predictions without and with captions."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    without, captions = (
        torch.rand(1, *KEYS_SHAPE, dtype=torch.float64),
        torch.rand(2, *KEYS_SHAPE, dtype=torch.float64),
    )

    def velocity(x, t, keys_values):
        return torch.tanh(x * keys_values.mean((1, 2)).view(-1, 1, 1, 1) + t.view(-1, 1, 1, 1) / 1000)

    sampler = sampler_of(velocity, steps=5, guidance=3.0)
    sampler.without_caption(without)
    found = sampler.sample(noise, captions)
    expected = ddim(
        noise,
        lambda x, t: [velocity(x, t, keys_values) for keys_values in (without.expand(2, -1, -1), captions)],
        [801, 601, 401, 201, 1],
        3.0,
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_captured_step_of_the_network_equals_the_formula():
    model = small_unet(torch.float32)
    context = torch.randn(2, SMALL.context_length, SMALL.context_width)
    shape = (SMALL.latent_channels, SMALL.latent_size, SMALL.latent_size)
    with torch.no_grad():
        keys_values = model.cross_keys_values(context)
        times = sampling_times(ABAR, 4)
        sampler = Sampler(model, model.velocity, times, 8.0, shape, keys_values, True, torch.float32)
        sampler.warm_up()
        sampler.without_caption(keys_values[:1])
        noise = torch.randn(2, *shape)
        with Capturable():
            recorded = sampler.sample(noise, keys_values).clone()
        assert recorded.is_contiguous(memory_format=torch.channels_last)
        captions = (context[:1].expand(2, -1, -1), context)
        expected = ddim(noise, lambda x, t: [model(x, t, each) for each in captions], [751, 501, 251, 1], 8.0)
    torch.testing.assert_close(recorded, expected, rtol=1e-3, atol=1e-3)


def test_evaluation_weights_are_used_and_then_restored():
    model = nn.Conv2d(4, 4, 1, bias=False)
    nn.init.zeros_(model.weight)
    sampler = sampler_of(lambda x, t, kv: model(x), steps=2, dtype=torch.float32, model=model)
    noise, keys_values = torch.ones(2, *SHAPE), torch.zeros(2, *KEYS_SHAPE)
    with sampler.evaluating(Weights({"weight": torch.ones(4, 4, 1, 1)})):
        replaced = sampler.sample(noise, keys_values).clone()
    with sampler.evaluating(Weights({"weight": model.weight})):
        own = sampler.sample(noise, keys_values)
    assert not torch.equal(replaced, own)
    assert model.weight.abs().max() == 0


def test_noise_depends_on_seed_and_prompt_only():
    seed = torch.tensor(123)
    whole = initial_noise(seed, torch.arange(6), SHAPE, torch.float32)
    parts = [initial_noise(seed, torch.tensor(ids), SHAPE, torch.float32) for ids in ([4, 0], [1], [5, 3, 2])]
    assert torch.equal(torch.cat(parts), whole[[4, 0, 1, 5, 3, 2]])
    assert not torch.equal(initial_noise(seed + 1, torch.arange(6), SHAPE, torch.float32), whole)
    assert whole.is_contiguous(memory_format=torch.channels_last)


def test_noise_is_normal_and_independent_between_prompts():
    noise = initial_noise(torch.tensor(7), torch.arange(40), (4, 16, 16), torch.float64).flatten(1)
    number = noise.numel()
    assert abs(noise.mean()) < 5 * number**-0.5
    assert abs(noise.var() - 1) < 5 * (2 / number) ** 0.5
    assert abs((noise**4).mean() - 3) < 5 * (96 / number) ** 0.5
    between = noise @ noise.T / noise.shape[1]
    assert (between - torch.diag(between.diag())).abs().max() < 5.5 * noise.shape[1] ** -0.5
