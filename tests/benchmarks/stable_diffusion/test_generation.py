"""Pictures of captions: decoded in parts that need not divide the batch, and without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from benchmarks.stable_diffusion.diffusion import abar, sampling_times
from benchmarks.stable_diffusion.generation import STAGES, GenerationSettings, Generator
from benchmarks.stable_diffusion.scoring_networks import random_networks
from common.contract.evaluation import Weights
from common.evaluation.stage_times import StageTimes
from tests.benchmarks.stable_diffusion.small_evaluation import INCEPTION, TEXT, VAE, VISION, small_model
from tests.capturable import Capturable

CPU = torch.device("cpu")
TOKENS = torch.tensor([[528, first, 529, 0, 0, 0, 0, 0, 0] for first in (5, 9, 70, 3, 11)])


@pytest.fixture(scope="module")
def made():
    """A U-Net and frozen networks in fp64, with nothing zero."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        empty = TOKENS[:1].clone()
        empty[0, 1:3] = torch.tensor([529, 0])
        return small_model(), random_networks(lambda texts: empty, VAE, TEXT, VISION, INCEPTION, CPU, torch.float64)


def pictures(made, batch, decode_batch, rows, recorded=False):
    """Of the captions ``rows``, made by a generator that was warmed up as an evaluation's is."""
    model, networks = made
    settings = GenerationSettings(sampling_times(abar(), 4), 3.0, batch, decode_batch)
    generator = Generator(model, networks, settings, 5, CPU, capture=True, stages=StageTimes(STAGES))
    prompts = torch.tensor(rows)
    tokens = TOKENS[prompts]
    with torch.no_grad():
        generator.warm_up()
    with generator.sampler.evaluating(Weights(dict(model.named_parameters()))):
        generator.begin()
        if recorded:
            with Capturable():
                return generator.pictures(prompts, tokens).clone()
        return generator.pictures(prompts, tokens).clone()


def test_pictures_depend_neither_on_the_batch_nor_on_how_many_are_decoded_together(made):
    alone = torch.cat([pictures(made, 1, 1, [row]) for row in range(5)])
    assert alone.shape == (5, 3, 8, 8)
    assert alone.min() >= 0
    assert alone.max() <= 1
    assert (alone[1:] - alone[0]).abs().amax((1, 2, 3)).min() > 1e-3
    for decode_batch in (1, 2, 5, 8):
        torch.testing.assert_close(pictures(made, 5, decode_batch, list(range(5))), alone, rtol=1e-9, atol=1e-9)


def test_sampling_and_decoding_can_be_recorded(made):
    assert torch.equal(pictures(made, 3, 2, [4, 0, 2], recorded=True), pictures(made, 3, 2, [4, 0, 2]))
