"""The dense network of DLRM against the formulas of its parts, and its published sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from dot_interaction_oracle import interaction
from torch import Tensor, nn

from benchmarks.dlrm.model import DlrmNetwork
from common.errors import ConfigError, UnsupportedImplementation
from common.recommendation.click_network import ClickArchitecture, loss
from tests.capturable import Capturable

CPU = torch.device("cpu")
PUBLISHED = ClickArchitecture(13, 128, (512, 256, 128), (1024, 1024, 512, 256, 1))
SMALL, TABLES = ClickArchitecture(13, 8, (16, 8), (12, 8, 1)), 3


def small(dtype: torch.dtype = torch.float64, seed: int = 0) -> DlrmNetwork:
    return DlrmNetwork(SMALL, TABLES, {}, CPU, dtype, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def published() -> DlrmNetwork:
    """At its full size."""
    generator = torch.Generator().manual_seed(1)
    return DlrmNetwork(PUBLISHED, 26, {}, CPU, torch.float32, generator)


def made_up(samples: int, tables: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Dense features, vectors of the tables, labels."""
    random = torch.Generator().manual_seed(5)
    dense = torch.randn(samples, 13, generator=random).to(dtype)
    vectors = 0.1 * torch.randn(samples, tables * width, generator=random)
    return dense, vectors.to(dtype), torch.randint(2, (samples,), generator=random).float()


def peer(layers: nn.ModuleList, logits: bool) -> nn.Sequential:
    """PyTorch's own layers around the same parameters."""
    found: list[nn.Module] = []
    for layer in layers:
        found += [layer, nn.ReLU()]
    return nn.Sequential(*(found[:-1] if logits else found))


def test_logits_loss_and_gradients_are_the_formulas() -> None:
    model = small()
    dense, vectors, label = made_up(11, TABLES, SMALL.width, torch.float64)
    label = label.double()
    bottom = model.bottom(dense)
    mean = loss(model.head(torch.cat([bottom, vectors], 1)), label)
    found = torch.autograd.grad(mean, list(model.parameters()))

    expected_bottom = peer(model.bot_l, False)(dense)
    torch.testing.assert_close(bottom, expected_bottom)
    x_BFW = torch.cat([expected_bottom, vectors], 1).view(11, 1 + TABLES, SMALL.width)
    logit = peer(model.top_l, True)(interaction(x_BFW, SMALL.width + 6))[:, 0]
    formula = (torch.log1p(torch.exp(logit)) - label * logit).mean()
    torch.testing.assert_close(mean, formula)
    for mine, theirs in zip(found, torch.autograd.grad(formula, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_parameters_are_as_many_as_published(published: DlrmNetwork) -> None:
    parts = (published.bot_l, published.top_l)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [171_392, 2_197_505]
    assert published.top_l[0].weight.shape == (1024, 479)
    assert (published.vectors, published.inputs) == (27, 3456)


def test_a_sample_takes_as_many_flops_as_published(published: DlrmNetwork) -> None:
    assert published.sample_flops() == 6 * (170_496 + 44_928 + 2_194_688)


@torch.no_grad()
def test_layers_start_normal(published: DlrmNetwork) -> None:
    biases = []
    for layer in (*published.bot_l, *published.top_l):
        count = layer.weight.numel()
        deviation = math.sqrt(2 / (layer.in_features + layer.out_features))
        assert layer.weight.std() == pytest.approx(deviation, rel=4 / count**0.5)
        assert abs(layer.weight.mean()) < 5 * deviation / count**0.5
        assert layer.weight.abs().max() > 2.4 * deviation  # not uniform
        biases.append(layer.bias * layer.out_features**0.5)
    assert torch.cat(biases).std() == pytest.approx(1, rel=0.05)


def test_the_first_loss_without_the_last_bias_is_about_the_logarithm_of_two(published: DlrmNetwork) -> None:
    """That bias alone has a deviation of 1, which would move every logit."""
    dense, vectors, label = made_up(256, 26, 128, torch.float32)
    with torch.no_grad():
        logit = published.head(torch.cat([published.bottom(dense.abs()), 0.1 * vectors], 1))
        mean = loss(logit - published.top_l[-1].bias, label)
    assert mean == pytest.approx(math.log(2), abs=0.03)


def test_weights_follow_from_the_generator() -> None:
    one, same, other = small(seed=4), small(seed=4), small(seed=5)
    for mine, again, different in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, again)
        assert not torch.equal(mine, different)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.004), (torch.bfloat16, 0.03)], ids=str)
def test_half_networks_are_the_exact_one_but_for_rounding(dtype: torch.dtype, bound: float) -> None:
    exact, half = small(), small(dtype)
    dense, vectors, _ = made_up(200, TABLES, SMALL.width, torch.float64)
    bottom = half.bottom(dense.float())
    assert bottom.dtype == dtype
    logit = half.head(torch.cat([bottom, vectors.to(dtype)], 1))
    expected = exact.head(torch.cat([exact.bottom(dense), vectors], 1))
    assert logit.dtype == torch.float32
    assert (logit - expected).norm() < bound * expected.norm()


def test_a_micro_batch_is_capturable() -> None:
    model = small(torch.bfloat16)
    dense, vectors, label = made_up(11, TABLES, SMALL.width, torch.float32)
    with Capturable():
        x0 = torch.cat([model.bottom(dense), vectors.bfloat16()], 1)
        loss(model.head(x0), label).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bottom_mlp": (16, 9)}, r"bottom_mlp=\[16, 9\]: its last layer must be width=8"),
        ({"top_mlp": ()}, r"top_mlp=\[\]: its last layer must be 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize("option", ["linear_relu", "dot_interaction"])
def test_an_unknown_implementation_is_refused_by_its_option(option: str) -> None:
    with pytest.raises(
        UnsupportedImplementation, match=f"model.implementations.{option}=fast: .* no implementation 'fast'"
    ):
        DlrmNetwork(SMALL, TABLES, {option: "fast"}, CPU, torch.float32, torch.Generator())
