"""The demo's network learns to draw the pattern of a caption."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.flux1 import synthetic
from benchmarks.flux1.flow import pack
from benchmarks.flux1.synthetic import PATTERNS, SyntheticEncodings
from benchmarks.flux1.workload import FluxTraining
from common import cli
from common.config.composition import compose
from common.data.batches import HostBatch
from common.distributed.layout import Layout

STEPS, EULER_STEPS = 192, 16


def options_of(workload: FluxTraining) -> SyntheticEncodings:
    facts = workload.own.facts
    return SyntheticEncodings(
        text_length=facts.text_length, text_width=facts.text_width, caption_width=facts.caption_width,
        latent_channels=facts.latent_channels, latent_size=facts.latent_size,
    )  # fmt: skip


def drawn(workload: FluxTraining, x_NLP: Tensor, t5_NTK: Tensor, clip_NK: Tensor) -> Tensor:
    """Return the latents that follow from noise: Euler's method from time 1 to 0."""
    for step in range(EULER_STEPS, 0, -1):
        t_N = torch.full((len(x_NLP),), step / EULER_STEPS)
        x_NLP = x_NLP - workload.model(x_NLP, t5_NTK, clip_NK, t_N) / EULER_STEPS
    return x_NLP


@pytest.mark.slow
def test_the_demo_draws_the_patterns_of_captions():
    run, _ = cli.load(compose(["benchmark=flux1", "scale=demo", "device=cpu"]))
    workload = FluxTraining(run, Layout(seed=3))
    step, options, batch = workload.build_step(), options_of(workload), run.micro_batch
    for number in range(STEPS):
        samples = [synthetic.sample(options, "train", number * batch + slot) for slot in range(batch)]
        tensors = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        ids = {"sample_ids": torch.arange(number * batch, (number + 1) * batch)}
        step([workload.prepare(HostBatch({**tensors, **ids}, batch, number))])
    workload.weights()

    patterns = synthetic.patterns(options)[:PATTERNS]
    t5, clip, latents = (torch.stack([pattern[name] for pattern in patterns]) for name in ("t5", "clip", "mean"))
    wanted_N = torch.arange(32) % PATTERNS
    patterns_4LP = pack(latents, workload.own.facts.patch)
    noise_NLP = torch.randn((32, *patterns_4LP.shape[1:]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x_NLP = drawn(workload, noise_NLP, t5[wanted_N], clip[wanted_N])
    distances_N4 = (x_NLP.unsqueeze(1) - patterns_4LP).flatten(2).norm(dim=2)
    assert (distances_N4.argmin(1) == wanted_N).float().mean() >= 0.9
