"""The dense network of DLRM against the formulas of its parts, and its published sizes."""

from __future__ import annotations

import math

import pytest
import torch
from dot_interaction_oracle import interaction
from torch import nn

from benchmarks.dlrm.model import DlrmNetwork
from common.recommendation.click_network import ClickArchitecture, loss
from tests.benchmarks.test_click_networks import loss_and_gradients, synthetic

CPU = torch.device("cpu")
PUBLISHED = ClickArchitecture(13, 128, (512, 256, 128), (1024, 1024, 512, 256, 1))
SMALL, TABLES = ClickArchitecture(13, 8, (16, 8), (12, 8, 1)), 3


@pytest.fixture(scope="module")
def published() -> DlrmNetwork:
    """At its full size."""
    generator = torch.Generator().manual_seed(1)
    return DlrmNetwork(PUBLISHED, 26, {}, CPU, torch.float32, generator)


def peer(layers: nn.ModuleList, logits: bool) -> nn.Sequential:
    """PyTorch's own layers around the same parameters."""
    found: list[nn.Module] = []
    for layer in layers:
        found += [layer, nn.ReLU()]
    return nn.Sequential(*(found[:-1] if logits else found))


def test_logits_loss_and_gradients_are_the_formulas():
    model = DlrmNetwork(SMALL, TABLES, {}, CPU, torch.float64, torch.Generator().manual_seed(0))
    dense, vectors, label = synthetic(11, TABLES, SMALL.width, torch.float64)
    label = label.double()
    bottom, mean, *found = loss_and_gradients(model, dense, vectors, label)
    expected_bottom = peer(model.bot_l, False)(dense)
    torch.testing.assert_close(bottom, expected_bottom)
    x_BFW = torch.cat([expected_bottom, vectors], 1).view(11, 1 + TABLES, SMALL.width)
    logit = peer(model.top_l, True)(interaction(x_BFW, SMALL.width + 6))[:, 0]
    formula = (torch.log1p(torch.exp(logit)) - label * logit).mean()
    torch.testing.assert_close(mean, formula)
    for mine, theirs in zip(found, torch.autograd.grad(formula, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_parameters_are_as_many_as_published(published):
    parts = (published.bot_l, published.top_l)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [171_392, 2_197_505]
    assert published.top_l[0].weight.shape == (1024, 479)
    assert (published.vectors, published.inputs) == (27, 3456)


def test_a_sample_takes_as_many_flops_as_published(published):
    assert published.sample_flops() == 6 * (170_496 + 44_928 + 2_194_688)


@torch.no_grad()
def test_layers_start_normal(published):
    biases = []
    for layer in (*published.bot_l, *published.top_l):
        count = layer.weight.numel()
        deviation = math.sqrt(2 / (layer.in_features + layer.out_features))
        assert layer.weight.std() == pytest.approx(deviation, rel=4 / count**0.5)
        assert abs(layer.weight.mean()) < 5 * deviation / count**0.5
        assert layer.weight.abs().max() > 2.4 * deviation  # not uniform
        biases.append(layer.bias * layer.out_features**0.5)
    assert torch.cat(biases).std() == pytest.approx(1, rel=0.05)


def test_the_first_loss_without_the_last_bias_is_about_the_logarithm_of_two(published):
    """That bias alone has a deviation of 1, which would move every logit."""
    dense, vectors, label = synthetic(256, 26, 128, torch.float32)
    with torch.no_grad():
        logit = published.head(torch.cat([published.bottom(dense.abs()), 0.1 * vectors], 1))
        mean = loss(logit - published.top_l[-1].bias, label)
    assert mean == pytest.approx(math.log(2), abs=0.03)
