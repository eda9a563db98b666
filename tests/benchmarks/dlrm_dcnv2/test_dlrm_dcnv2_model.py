"""The dense network of DLRM-DCNv2 against the formulas of its parts, and its published sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cross_network_oracle import network as cross_network
from torch import Tensor, nn

from benchmarks.dlrm_dcnv2.model import DlrmDcnv2Architecture, DlrmDcnv2Network
from common.recommendation.click_network import loss
from tests.benchmarks.test_click_networks import loss_and_gradients, synthetic

CPU = torch.device("cpu")
PUBLISHED = DlrmDcnv2Architecture(13, 128, (512, 256, 128), (1024, 1024, 512, 256, 1), 3, 512)
SMALL, TABLES = DlrmDcnv2Architecture(13, 8, (16, 8), (12, 8, 1), 2, 4), 3


@pytest.fixture(scope="module")
def published() -> DlrmDcnv2Network:
    """At its full size."""
    generator = torch.Generator().manual_seed(1)
    return DlrmDcnv2Network(PUBLISHED, 26, {}, CPU, torch.float32, generator)


def mlp(x: Tensor, layers: nn.ModuleList, last: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the network by einsum; ``last`` follows the last layer."""
    for number, layer in enumerate(layers):
        x = torch.einsum("bk,nk->bn", x, layer.weight) + layer.bias
        x = x.clamp(min=0) if number + 1 < len(layers) else last(x)
    return x


def test_logits_loss_and_gradients_are_the_formulas():
    model = DlrmDcnv2Network(SMALL, TABLES, {}, CPU, torch.float64, torch.Generator().manual_seed(0))
    dense, vectors, label = synthetic(11, TABLES, SMALL.width, torch.float64)
    label = label.double()
    bottom, mean, *found = loss_and_gradients(model, dense, vectors, label)
    expected_bottom = mlp(dense, model.dense_arch, lambda x: x.clamp(min=0))
    torch.testing.assert_close(bottom, expected_bottom)
    net = model.crossnet
    crossed = cross_network(
        torch.cat([expected_bottom, vectors], 1), list(net.V_kernels), list(net.W_kernels), list(net.bias)
    )
    probability = 1 / (1 + torch.exp(-mlp(crossed, model.over_arch, lambda x: x)[:, 0]))
    formula = -(label * probability.log() + (1 - label) * (1 - probability).log()).mean()
    torch.testing.assert_close(mean, formula)
    for mine, theirs in zip(found, torch.autograd.grad(formula, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_parameters_are_as_many_as_published(published):
    parts = (published.dense_arch, published.crossnet, published.over_arch)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [171_392, 10_627_200, 5_245_953]
    assert sum(p.numel() for p in published.parameters()) == 16_044_545
    assert published.inputs == 3456


def test_a_sample_takes_as_many_flops_as_published(published):
    assert published.sample_flops() == 6 * (170_496 + 10_616_832 + 5_243_136)


def test_names_are_the_references(published):
    names = dict(published.named_parameters())
    assert {name.split(".")[0] for name in names} == {"dense_arch", "crossnet", "over_arch"}
    assert names["crossnet.V_kernels.2"].shape == (512, 3456)
    assert names["crossnet.W_kernels.0"].shape == (3456, 512)
    assert names["crossnet.bias.1"].shape == (3456,)
    assert names["over_arch.4.weight"].shape == (1, 256)


def test_parameters_are_grouped_by_the_layer_whose_backward_pass_completes_them(published):
    ordered, named = published.parameters_by_layer(), dict(published.named_parameters())
    assert ordered.keys() == named.keys()
    assert all(ordered[name] is named[name] for name in named)
    of_layer = [name.rpartition(".")[2] for name in ordered if name.startswith("crossnet.")]
    assert of_layer == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    first, *_, last = ordered
    assert (first.split(".")[0], last.split(".")[0]) == ("dense_arch", "over_arch")


@torch.no_grad()
def test_linear_layers_start_uniform_within_the_root_of_their_inputs(published):
    for layer in (*published.dense_arch, *published.over_arch):
        bound = layer.in_features**-0.5
        for values in (layer.weight, layer.bias):
            assert values.abs().max() <= bound
        assert layer.weight.abs().max() > 0.97 * bound
        count = layer.weight.numel()
        assert layer.weight.std() == pytest.approx(bound / 3**0.5, rel=5 / count**0.5)
        assert abs(layer.weight.mean()) < 5 * bound / count**0.5


@torch.no_grad()
def test_the_cross_network_starts_by_glorots_normal_rule(published):
    net = published.crossnet
    for kernel in (*net.V_kernels, *net.W_kernels):
        assert kernel.std() == pytest.approx(math.sqrt(2 / (3456 + 512)), rel=0.005)
        assert abs(kernel.mean()) < 1e-4
        assert kernel.abs().max() > 4 * kernel.std()  # not uniform, not truncated
    assert not any(bias.any() for bias in net.bias)


def test_the_first_loss_is_about_the_logarithm_of_two(published):
    dense, vectors, label = synthetic(256, 26, 128, torch.float32)
    with torch.no_grad():
        mean = loss(published.head(torch.cat([published.bottom(dense.abs()), 0.1 * vectors], 1)), label)
    assert mean == pytest.approx(math.log(2), abs=0.03)
