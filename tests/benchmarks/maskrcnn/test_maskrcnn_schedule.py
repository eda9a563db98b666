"""Mask R-CNN's learning rates: the values of the published configuration, and which parameters have which."""

from __future__ import annotations

import bisect
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.maskrcnn.config import Facts, Hparams
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.schedule import learning_rate, parameter_groups, subtractive_warmup_then_step_decay
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.optim.optimizer import Optimizer
from common.step.train_step import apply_gradients

FACTS = fixed_facts(Facts, "maskrcnn")
HPARAMS = Hparams(
    source="a global batch of 96",
    global_batch_size=96,
    base_learning_rate=0.12,
    momentum=0.9,
    weight_decay=1e-4,
    optimizer="sgd_with_momentum",
    warmup_steps=625,
    warmup_factor=1.92e-4,
    decay_steps=(12_000, 16_000),
    image_candidates=12_000,
    candidates_from="micro_batch",
)
SMALL = replace(
    FACTS,
    classes=2,
    layers=(1, 1, 1, 1),
    width=4,
    pyramid_channels=4,
    box_channels=4,
    box_resolution=2,
    mask_resolution=2,
)


def rate(base: float, t: int) -> float:
    """Return the rate of the published configuration in update ``t``, counted from 1."""
    schedule = subtractive_warmup_then_step_decay(base, 625, 1.92e-4, (12_000, 16_000), 0.1)
    return schedule(torch.tensor(t - 1)).item()


@pytest.mark.parametrize(
    ("t", "weights", "biases"),
    [
        (1, 1.92e-4, 0.12 + 1.92e-4),
        (624, 0.12 - 1.92e-4, 0.24 - 1.92e-4),
        (625, 0.12, 0.24),
        (11_999, 0.12, 0.24),
        (12_000, 0.012, 0.024),
        (15_999, 0.012, 0.024),
        (16_000, 0.0012, 0.0024),
    ],
)
def test_the_warm_up_lacks_the_same_of_both_rates_and_the_falls_are_factors(t, weights, biases):
    assert rate(0.12, t) == pytest.approx(weights, rel=1e-6, abs=1e-9)
    assert rate(0.24, t) == pytest.approx(biases, rel=1e-6)


def test_the_first_update_counts_as_1():
    assert learning_rate(FACTS, HPARAMS)(torch.tensor(0)).item() == pytest.approx(1.92e-4, rel=1e-6)
    assert learning_rate(FACTS, HPARAMS, bias=True)(torch.tensor(0)).item() == pytest.approx(0.12 + 1.92e-4, rel=1e-6)


def test_what_is_lacking_may_be_more_than_the_rate():
    """In the set for a global batch of 48 the first updates go uphill, in the reference too."""
    schedule = subtractive_warmup_then_step_decay(0.06, 800, 9.6e-5, (24_000, 32_000), 0.1)
    assert schedule(torch.tensor(0)).item() == pytest.approx(0.06 - 799 * 9.6e-5, rel=1e-6)
    assert schedule(torch.tensor(0)).item() < 0


def test_without_a_warm_up_it_starts_at_the_base():
    assert subtractive_warmup_then_step_decay(0.5, 0, 1.0, (3, 4), 0.1)(torch.tensor(0)).item() == 0.5


def test_biases_are_whatever_is_named_so_and_nothing_frozen_is_in_a_group():
    network = MaskRCNN(SMALL, torch.Generator().manual_seed(0))
    weights, biases = parameter_groups(network, FACTS, HPARAMS)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert {*weights.parameters, *biases.parameters} == trained
    # of the pyramid 8, of the proposals' head 3, of the box head 4, of the mask head 4 + 2
    assert {name.rpartition(".")[2] for name in biases.parameters} == {"bias"}
    assert len(biases.parameters) == 8 + 3 + 4 + 6
    assert not any(parameter.dim() == 1 for parameter in weights.parameters.values())
    assert (weights.weight_decay, biases.weight_decay) == (1e-4, 0.0)


def test_updates_are_the_reference_optimizers_with_a_rate_for_either_group():
    """SGD in float64 whose rates are set before every step, as the reference sets them."""
    hparams = replace(HPARAMS, warmup_steps=3, warmup_factor=0.01, decay_steps=(5, 7))
    ours, theirs = (MaskRCNN(SMALL, torch.Generator().manual_seed(0)).double() for _ in range(2))
    groups = parameter_groups(ours, FACTS, hparams)
    optimizer = Optimizer(
        groups, hparams.sgd(), learning_rate(FACTS, hparams), Layout(), grad_divisor=1.0, implementation="reference"
    )
    reference = torch.optim.SGD(
        [
            {
                "params": [p for n, p in theirs.named_parameters() if p.requires_grad and "bias" not in n],
                "weight_decay": 1e-4,
            },
            {
                "params": [p for n, p in theirs.named_parameters() if p.requires_grad and "bias" in n],
                "weight_decay": 0.0,
            },
        ],
        lr=1.0,
        momentum=0.9,
    )
    generator = torch.Generator().manual_seed(1)
    for t in range(1, 9):
        optimizer.begin()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if mine.requires_grad:
                other.grad = torch.randn(other.shape, generator=generator, dtype=torch.float64)
                mine.grad.copy_(other.grad)
        optimizer.arm()
        apply_gradients([optimizer], torch.tensor(0.0))
        for group, base in zip(reference.param_groups, (0.12, 0.24), strict=True):
            value = base - (3 - t) * 0.01 if t < 3 else base * 0.1 ** bisect.bisect_right((5, 7), t)
            group["lr"] = float(np.float32(value))
        reference.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14, msg=name)
